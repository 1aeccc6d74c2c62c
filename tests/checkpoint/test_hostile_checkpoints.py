"""Every command that loads a checkpoint is given one that would run code: it runs nothing and says so."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_checkpoint_files import Runs
from helpers.tiny_run import GVPO, SHORT, configure, fit

from megatron_gvpo.cli import main

pytestmark = pytest.mark.usefixtures("leave_the_process_group")
CODE = "import pathlib\npathlib.Path({marker!r}).mkdir()\n"


@pytest.fixture(scope="module")
def trained(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    out = tmp_path_factory.mktemp("trained")
    fit(configure(task, out, *GVPO, *SHORT, "train.steps=1"))
    return out


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists(), "a file of the checkpoint was run"


def list_that_runs(checkpoint: Path, marker: Path) -> str:
    listed = pickle.loads((checkpoint / ".metadata").read_bytes())
    listed.planner_data = Runs(marker)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(listed))
    return ".metadata: it is a pickle that names posix.mkdir"


def object_that_runs(checkpoint: Path, marker: Path) -> str:
    """In the place of an object that every load reads."""
    listed = pickle.loads((checkpoint / ".metadata").read_bytes())
    index, entry = next((i, p) for i, p in listed.storage_data.items() if i.fqn.startswith("common_state"))
    file = checkpoint / entry.relative_path
    before = file.stat().st_size
    with file.open("ab") as stream:
        torch.save([Runs(marker)], stream)
    listed.storage_data[index] = type(entry)(entry.relative_path, before, file.stat().st_size - before)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(listed))
    return "common_state/shard_0_1 is a pickle that names posix.mkdir"


def common_file(checkpoint: Path, marker: Path) -> str:
    torch.save(Runs(marker), checkpoint / "common.pt")
    return "common.pt: no checkpoint of this program has this file"


@pytest.mark.parametrize("hostile", [list_that_runs, object_that_runs, common_file])
def test_megatron_checkpoints(
    task: Path, trained: Path, tmp_path: Path, marker: Path, capfd: Any, hostile: Callable[..., str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    checkpoint = run / "checkpoints" / "step_00000001"
    message = hostile(checkpoint, marker)
    (checkpoint / "checksums.json").unlink()  # a forger would correct it, and state.json
    state = json.loads((checkpoint / "state.json").read_text())
    unbound = {key: value for key, value in state.items() if key not in ("lists", "checksum")}
    (checkpoint / "state.json").write_text(json.dumps(unbound))
    arguments = [str(task / "run.yaml"), "algorithm=gvpo", *SHORT, f"output_dir={run}"]
    evaluated = [text for text in arguments if not text.startswith("data.eval")]
    for command in (
        ["train", *arguments, "train.mini_batches=2", "train.steps=2", "--resume"],
        ["eval", *evaluated, "--resume"],
        ["export", *arguments, "--out", str(tmp_path / "out")],
        ["convert", str(checkpoint), str(tmp_path / "back"), "--like", str(task / "model")],
    ):
        assert main(command) == 1, command[0]
        error = capfd.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: cannot read {checkpoint}") and message in error, error
        assert not (tmp_path / "out").exists() and not (tmp_path / "back").exists()


def test_pickled_weights(task: Path, tmp_path: Path, marker: Path, capfd: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(task / "model", model)
    (model / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Runs(marker)}, model / "pytorch_model.bin")
    arguments = [str(task / "run.yaml"), f"model.path={model}", *SHORT, f"output_dir={tmp_path / 'run'}"]
    evaluated = [text for text in arguments if not text.startswith("data.eval")]
    for command in (
        ["train", "algorithm=gvpo", *arguments],
        ["eval", *evaluated],
        ["convert", str(model), str(tmp_path / "megatron")],
        # This program ends well, as an interpreter that has the engine does.
        ["serve", *arguments, "rollout.engine=sglang", "rollout.servers.python=/bin/true"],
    ):
        assert main(command) == 2, command[0]
        error = capfd.readouterr().err.splitlines()[-1]
        key = "SOURCE" if command[0] == "convert" else "model.path"
        reason = "no weights there (*.safetensors); pytorch_model.bin is a pickle, which is not read"
        assert error == f"error: {key}={model}: {reason}"


def code_of_the_tokenizer(model: Path) -> None:
    file = model / "tokenizer_config.json"
    code = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | code))


def code_of_the_model(model: Path) -> None:
    file = model / "config.json"
    code = {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | code))


@pytest.mark.parametrize("hostile", [code_of_the_tokenizer, code_of_the_model])
def test_code_beside_the_weights(
    task: Path, tmp_path: Path, marker: Path, capfd: Any, hostile: Callable[[Path], None]
) -> None:
    """transformers would import it with trust_remote_code=True. It is ignored, or the model is refused."""
    model = tmp_path / "model"
    shutil.copytree(task / "model", model)
    hostile(model)
    (model / "mine.py").write_text(CODE.format(marker=str(marker)))
    arguments = [str(task / "run.yaml"), f"model.path={model}", f"output_dir={tmp_path / 'run'}", SHORT[0]]
    for command in (
        ["eval", *arguments, "data.eval.limit=1"],
        ["convert", str(model), str(tmp_path / "megatron")],
    ):
        code, error = main(command), capfd.readouterr().err
        assert code == (0 if hostile is code_of_the_tokenizer else 2), command[0]
        assert code == 0 or (error.startswith("error: ") and error.count("\n") == 1), error
