"""`megatron-gvpo convert`: a round trip byte for byte, a run's checkpoint, and refused input."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.references import gradient_reference as reference
from helpers.small_constants import small_constants
from safetensors.torch import load_file

from megatron_gvpo.cli import main

# Files of tokenizers, among them Kimi K2's and Mistral's.
TOKENIZER = ("tiktoken.model", "tokenization_kimi.py", "tool_declaration_ts.py", "tokenizer_config.json")
TOKENIZER += ("tekken.json", "added_tokens.json", "chat_template.jinja", "qwen.tiktoken")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    reference.save_models(directory)
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("family", ["tied", "deepseek_v3"])
def test_there_and_back(models: Path, tmp_path: Path, family: str) -> None:
    converted, back = tmp_path / "megatron", tmp_path / "hf"
    assert main(["convert", str(models / family), str(converted)]) == 0
    like = tmp_path / "like"  # the same architecture with other weights: none of them may be left
    config = reference.CONFIGS[family]()
    torch.manual_seed(1)
    reference.transformers.AutoModelForCausalLM.from_config(config).save_pretrained(like)
    for name in TOKENIZER:
        (like / name).write_text(name)
    assert main(["convert", str(converted), str(back), "--like", str(like)]) == 0
    assert_same_weights(back, models / family)
    assert [name for name in TOKENIZER if not (back / name).is_file()] == []


def test_there_and_back_in_several_files(models: Path, tmp_path: Path) -> None:
    """The same with a source of several files, through sizes that large models exceed."""
    source, converted, back = tmp_path / "source", tmp_path / "megatron", tmp_path / "hf"
    model = reference.transformers.AutoModelForCausalLM.from_pretrained(models / "qwen3_moe")
    model.save_pretrained(source, max_shard_size="30KB")
    with small_constants():
        assert main(["convert", str(source), str(converted)]) == 0
        assert main(["convert", str(converted), str(back), "--like", str(source)]) == 0
    assert all(len(list(directory.glob("model-*.safetensors"))) > 2 for directory in (source, back))
    assert_same_weights(back, models / "qwen3_moe")
    reference.transformers.AutoModelForCausalLM.from_pretrained(back)  # reads the index


def test_what_is_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, full = str(models / "tied"), tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    cases = {
        (source, str(full)): "TARGET=.*full: this directory is not empty",
        (source, f"{__file__}/below"): "TARGET=.*below: .*test_convert.py is not a directory",
        (
            source,
            str(tmp_path / "a"),
            "--like",
            source,
        ): "has no .metadata, so it is not a Megatron checkpoint",
        (str(tmp_path / "none"), str(tmp_path / "a")): "SOURCE=.*none: no config.json there",
    }
    for arguments, message in cases.items():
        assert main(["convert", *arguments]) == 2
        assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("target", ["/proc/x", "x" * 5000, "x" * 256, "read-only"])
def test_a_target_that_cannot_be_written_is_one_line(
    models: Path, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    make = Path.mkdir

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "read-only":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert main(["convert", str(models / "tied"), target]) in (1, 2)
    error = capsys.readouterr().err
    assert target[:100] in error and "Traceback" not in error
    assert re.search("cannot write|File name too long|nothing can be written", error.splitlines()[-1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("back", [False, True])
def test_a_full_disk_leaves_the_target_as_it_was(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, back: bool
) -> None:
    """A part of the model was in the way of the next try: "this directory is not empty"."""
    model, converted, target = models / "tied", tmp_path / "megatron", tmp_path / "target"
    assert main(["convert", str(model), str(converted)]) == 0
    command = ["convert", str(converted), str(target), "--like", str(model)] if back else []
    command = command or ["convert", str(model), str(target)]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copy", full)  # the last that is written
        assert main(command) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not list(target.iterdir())
    assert main(command) == 0


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x1b[2Jb"])
@pytest.mark.parametrize(
    "command", [["convert", "x"], ["export", "x.yaml", "--out"]], ids=lambda words: words[0]
)
def test_what_is_not_a_name_is_refused(command: list[str], name: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, name])
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and f"{name!r}: expected the name of a directory" in line


def test_a_link_is_named_before_anything_is_computed(models: Path, tmp_path: Path, capsys) -> None:
    """The last step, a rename, failed on it."""
    (tmp_path / "there").mkdir()
    for source in (tmp_path / "there", tmp_path / "nowhere"):
        link = tmp_path / f"to_{source.name}"
        link.symlink_to(source)
        assert main(["convert", str(models / "tied"), str(link)]) == 2
        assert f"TARGET={link}: this is a link, to {source}" in capsys.readouterr().err


def test_sources_with_impossible_names_are_one_line(models: Path, tmp_path: Path, capsys) -> None:
    assert main(["convert", "x" * 5000, str(tmp_path / "a")]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_like_another_model_of_the_same_shapes(models: Path, tmp_path: Path, capsys) -> None:
    """Fails on the old code, which wrote padding as the rows of tokens that the model has never had."""
    converted, like = tmp_path / "megatron", tmp_path / "like"
    assert main(["convert", str(models / "tied"), str(converted)]) == 0
    shutil.copytree(models / "tied", like)
    values = json.loads((like / "config.json").read_text())
    values |= {"vocab_size": values["vocab_size"] + 1, "transformers_version": "another"}
    (like / "config.json").write_text(json.dumps(values))
    assert main(["convert", str(converted), str(tmp_path / "back"), "--like", str(like)]) == 2
    assert "vocab_size=" in capsys.readouterr().err and not (tmp_path / "back").exists()
