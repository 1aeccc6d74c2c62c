"""Weights that are not exactly the model's are refused by name: of Hugging Face, and in checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.distributed import forget_layout
from helpers.references import gradient_reference as reference
from helpers.tiny_run import GVPO, SHORT, configure, fit
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import CheckpointError, ConfigError
from megatron_gvpo.huggingface.complete_weights import stored_tensors
from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig
from megatron_gvpo.training import conversion
from megatron_gvpo.training.evaluate import evaluate

Tensors = dict[str, Tensor]
FIRST = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    reference.save_models(directory)
    return directory


@pytest.fixture
def group() -> Iterator[None]:
    from megatron_gvpo.megatron import parallel

    parallel.initialize(ParallelConfig(), seed=0)
    yield
    parallel.shut_down()


def changed(source: Path, target: Path, change: Callable[[Tensors], object], **config: object) -> Path:
    """A copy of a model whose tensors `change` changes in place, and these keys of its config.json."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    return target


def without(pattern: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        doomed = [name for name in tensors if re.search(pattern, name)]
        assert doomed
        for name in doomed:
            del tensors[name]

    return change


def with_tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape).to(dtype)})


def with_more_tokens(tensors: Tensors) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name][:4]])


def with_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def with_other_head(tensors: Tensors) -> None:
    with_head(tensors)
    tensors["lm_head.weight"][-1, -1] += 1e-3


EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
MTP = {"num_nextn_predict_layers": 1}
REFUSED = {
    "up_proj": ("untied", without(f"^{FIRST}$"), rf"it lacks 1 tensor \({FIRST}\): all 51 of config.json"),
    "bias": ("untied", without("layers.2.*q_proj.bias"), r"lacks 1 tensor \(.*2.self_attn.q_proj.bias\)"),
    "norm": ("untied", without("^model.norm"), r"it lacks 1 tensor \(model.norm.weight\)"),
    "layer": (
        "untied",
        without(r"layers\.3\."),
        r"it lacks 12 tensors \(model.layers.3.input.*, ...\): all 51 .*num_hidden_layers=4",
    ),
    "embedding": ("tied", without("embed_tokens"), r"it lacks 1 tensor \(model.embed_tokens.weight\)"),
    "head": (
        "untied",
        without("lm_head"),
        r"it lacks 1 tensor \(lm_head.weight\).*tie_word_embeddings=false",
    ),
    "expert": ("qwen3_moe", without(EXPERT), rf"it lacks 1 tensor \({EXPERT}\)"),
    "router's bias": ("deepseek_v3", without("1.*correction_bias"), r"lacks 1 tensor \(.*correction_bias\)"),
    "extra": (
        "untied",
        with_tensor("model.layers.4.mlp.up_proj.weight", 48, 32),
        r"has 1 tensor \(model.layers.4.mlp.up_proj.weight \(in model.safetensors\)\) that the model of",
    ),
    "extra bias": (
        "untied",
        with_tensor("model.layers.0.self_attn.o_proj.bias", 32),
        r"has 1 tensor \(model.layers.0.self_attn.o_proj.bias .* does not take: remove what is not",
    ),
    "quantised": ("untied", with_tensor(FIRST + "_scale_inv", 1, 1), "that cannot be trained: .*quantised"),
    "integers": ("untied", with_tensor("model.norm.weight", 32, dtype=torch.int8), "norm.* has dtype I8"),
    "shape": ("untied", with_tensor(FIRST, 47, 32), r"up_proj.* has shape \[47, 32\], .* says \[48, 32\]"),
    "other head": ("tied", with_other_head, "lm_head.* is not model.embed_tokens.weight, .*tie_word_emb"),
    "two predictors": (
        "deepseek_v3",
        lambda tensors: [with_tensor(f"model.layers.{i}.enorm.weight", 32)(tensors) for i in (4, 5)],
        r"has 1 tensor \(model.layers.5.enorm.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exactly_the_models_is_refused(models, tmp_path, group, case):
    from megatron_gvpo.megatron.model.build import build

    family, change, message = REFUSED[case]
    model = changed(models / family, tmp_path / "model", change, **(MTP if case == "two predictors" else {}))
    with pytest.raises(ConfigError) as refused:
        build(ModelConfig(path=str(model)), ParallelConfig(), trained=False)
    error = str(refused.value)
    assert error.startswith(f"model.path={model}: ") and "\n" not in error, error
    assert re.search(message, error), error


ACCEPTED = {
    "equal head": ("tied", with_head),
    "head in another precision": (
        "tied",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].double()}),
    ),
    "frequencies": ("untied", with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 4)),
    "predictor": ("deepseek_v3", with_tensor("model.layers.4.enorm.weight", 32)),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_changes_nothing_is_accepted(models, tmp_path, group, case):
    from megatron_gvpo.megatron.model.build import build

    family, change = ACCEPTED[case]
    model = changed(models / family, tmp_path / "model", change, **(MTP if case == "predictor" else {}))
    same = ModelConfig(path=str(model), dtype="float32")
    built = dict(build(same, ParallelConfig(), trained=False).export())
    for name, tensor in load_file(models / family / "model.safetensors").items():
        assert torch.equal(built[name], tensor), name


def test_heads_for_further_tokens_are_kept_and_exported(models, tmp_path, group, caplog):
    """Nothing here computes with them."""
    from megatron_gvpo.megatron.model.build import build

    name = "model.layers.4.enorm.weight"
    source = changed(models / "deepseek_v3", tmp_path / "model", with_tensor(name, 32), **MTP)
    built = build(ModelConfig(path=str(source), dtype="float32"), ParallelConfig())
    [warning] = [record.message for record in caplog.records if "further tokens" in record.message]
    assert f"model.path={source} has 1 tensors of heads for further tokens ({name}, ...)" in warning
    built.save_hf(tmp_path / "exported")
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "exported"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    build(ModelConfig(path=str(tmp_path / "exported"), dtype="float32"), ParallelConfig(), trained=False)


def test_an_export_that_cannot_be_written_takes_part_in_all_gathers(models, tmp_path, group, monkeypatch):
    """The other ranks would wait for rank 0 in the gather of the next tensor."""
    from megatron_gvpo.huggingface.checked_weights import SafetensorsWriter
    from megatron_gvpo.megatron.model.build import build
    from megatron_gvpo.megatron.model.model import Model

    built = build(ModelConfig(path=str(models / "llama3"), dtype="float32"), ParallelConfig(), trained=False)
    gathered, tensors = [], list(built.export())

    def export(self: Model) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            gathered.append(name)

    def add(self: SafetensorsWriter, name: str, tensor: Tensor) -> None:
        raise MemoryError("no memory for a copy")

    monkeypatch.setattr(Model, "export", export)
    monkeypatch.setattr(SafetensorsWriter, "add", add)
    with pytest.raises(MemoryError, match="for a copy"):
        built.save_hf(tmp_path / "exported")
    assert gathered == [name for name, _ in tensors]


def test_an_index_that_leaves_a_tensor_out(models, tmp_path, group):
    from megatron_gvpo.megatron.model.build import build

    model = changed(models / "untied", tmp_path / "model", lambda tensors: None)
    names = load_file(model / "model.safetensors").keys() - {FIRST}
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"\({FIRST}\), or model.*index.json does not name them"):
        build(ModelConfig(path=str(model)), ParallelConfig(), trained=False)


def test_two_copies_of_a_tensor_must_be_equal(models, tmp_path):
    """Fails on the old code, which took the copy that the index names; an engine may take the other."""
    model = changed(models / "untied", tmp_path / "model", lambda tensors: None)
    tensors = load_file(model / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors") | {"more": "more.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    more = {"more": torch.ones(1), FIRST: tensors[FIRST].clone()}
    save_file(more, model / "more.safetensors")
    stored_tensors(model, "model.path")
    more[FIRST][-1, -1] += 1
    save_file(more, model / "more.safetensors")
    message = rf"{FIRST} is in model.safetensors and, with other values, in more.safetensors: remove one"
    with pytest.raises(ConfigError, match=message):
        stored_tensors(model, "model.path")
    text = json.dumps(index).replace('"more":', f'"{FIRST}": "more.safetensors", "more":')
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"index.json: not valid JSON \(field '{FIRST}' is given twice\)"):
        stored_tensors(model, "model.path")


def test_files_that_the_index_does_not_list_are_no_part_of_the_model(tmp_path: Path) -> None:
    """Mistral's directories have the same weights once more, under other names, for other programs.

    Fails on the old code: the first push lacked all tensors of consolidated.safetensors.
    """
    weight = {"a.weight": torch.zeros(2, 3).to(torch.float8_e4m3fn)}
    save_file(weight, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"other": torch.zeros(6)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    [(name, stored)] = stored_tensors(tmp_path, "model.path").items()
    assert (name, stored.shape, stored.dtype) == ("a.weight", (2, 3), "F8_E4M3")


def test_the_command_line_says_it_in_one_line(task, tmp_path, capfd):
    model = changed(task / "model", tmp_path / "model", without("layers.0.mlp.up_proj"))
    settings = ["algorithm=ppo", f"output_dir={tmp_path / 'run'}", *SHORT]
    for command, key in ((["train"], "model.path"), (["eval", "data.eval.limit=1"], "model.path")):
        overrides = [text for text in settings if command[0] == "train" or not text.startswith("data.eval")]
        arguments = [command[0], str(task / "run.yaml"), *overrides, *command[1:], f"model.path={model}"]
        assert main(arguments) == 2
        error = capfd.readouterr().err
        assert error.startswith(f"error: {key}={model}: it lacks 1 tensor (") and error.count("\n") == 1
    critic = f'algorithm={{"recipe": "ppo", "critic": {{"path": "{model}"}}}}'
    assert main(["train", str(task / "run.yaml"), *settings[1:], critic]) == 2
    assert capfd.readouterr().err.startswith(f"error: algorithm.critic.path={model}: it lacks 1 tensor (")
    assert main(["convert", str(model), str(tmp_path / "megatron")]) == 2
    assert capfd.readouterr().err.startswith(f"error: SOURCE={model}: it lacks 1 tensor (")
    assert not (tmp_path / "megatron").exists()
    assert main(["convert", str(task / "model"), str(task / "model" / "inside")]) == 2
    assert f"this is in {task / 'model'}, and would become a part of it" in capfd.readouterr().err
    inside = tmp_path / "run" / "checkpoints" / "hf"
    assert main(["export", str(task / "run.yaml"), *settings[1:], "--out", str(inside)]) == 2
    assert "checkpoints, and would become a part of it" in capfd.readouterr().err


TIED_CHECKPOINT = (
    "it lacks 1 tensor (output_layer.weight) of the model: the checkpoint is of a model with tie"
)
UNTIED_CHECKPOINT = "it has 1 tensor (output_layer.weight) that the model does not take: the checkpoint is of"


def test_convert_like_another_model(models, tmp_path, capsys):
    shallow = tmp_path / "shallow"
    changed(models / "untied", shallow, without(r"layers\.3\."), num_hidden_layers=3, layer_types=None)
    cases = {
        ("tied", models / "untied"): TIED_CHECKPOINT,
        ("untied", models / "tied"): UNTIED_CHECKPOINT,
        ("untied", models / "qwen3"): "self_attention.q_layernorm.weight",
        ("untied", shallow): "shape",
    }
    for (source, like), message in cases.items():
        converted, back = tmp_path / source, tmp_path / "back"
        if not converted.exists():
            assert main(["convert", str(models / source), str(converted)]) == 0
            recorded = (converted / "source_config.json").read_text()
        (converted / "source_config.json").write_text(recorded)
        capsys.readouterr()
        assert main(["convert", str(converted), str(back), "--like", str(like)]) == 2
        assert f"SOURCE={converted} was converted from a model with" in capsys.readouterr().err
        (converted / "source_config.json").unlink()  # weights of other origins have none
        assert main(["convert", str(converted), str(back), "--like", str(like)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: cannot read {converted} as weights of {like}: ") and message in error
        assert not back.exists()


@pytest.fixture(scope="module")
def tied_task(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task with a model whose output layer is its embedding."""
    directory = tmp_path_factory.mktemp("tied") / "task"
    shutil.copytree(task, directory)
    shutil.rmtree(directory / "model")
    changed(task / "model", directory / "model", without("lm_head"), tie_word_embeddings=True)
    (directory / "run.yaml").write_text((task / "run.yaml").read_text().replace(str(task), str(directory)))
    return directory


@pytest.mark.usefixtures("leave_the_process_group")
def test_resume_and_export_with_another_tying(task, tied_task, tmp_path):
    moving = {"tied": tied_task, "untied": task}
    for name, folder in moving.items():
        fit(configure(folder, tmp_path / name, *GVPO, *SHORT, "train.steps=1"))
    for name, other, saved, here in (("tied", task, True, False), ("untied", tied_task, False, True)):
        config = configure(other, tmp_path / name, *GVPO, *SHORT, "train.steps=2")
        message = f"step_00000001 is of a model with tie_word_embeddings={saved} in its config.json, and the "
        with pytest.raises(CheckpointError, match=f"{message}model here has {here}: "):
            fit(config, resume=True)
        with pytest.raises(CheckpointError, match=message):
            conversion.checkpoint_to_hugging_face(config, tmp_path / "hf")
        forget_layout()
    assert not (tmp_path / "hf").exists()
    for name, folder in moving.items():  # and what fits goes on
        fit(configure(folder, tmp_path / name, *GVPO, *SHORT, "train.steps=2"), resume=True)
        assert complete_checkpoints(tmp_path / name / "checkpoints")[-1].name == "step_00000002"


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_checkpoint_belongs_to_the_model_that_the_run_began_with(task, tmp_path, capfd):
    """Every shape fits: the rows of a vocabulary are padded, and a norm's epsilon has no weight.

    So the run would go on, be evaluated and exported as another function, with padding as tokens.
    """
    fit(configure(task, tmp_path / "run", *GVPO, *SHORT, "train.steps=1"))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    other = changed(task / "model", tmp_path / "other", lambda tensors: None, rms_norm_eps=0.5)
    message = "is of a model with rms_norm_eps=1e-06 in its config.json, and the model here has 0.5: name"
    config = configure(task, tmp_path / "run", *GVPO, *SHORT, "train.steps=2", f"model.path={other}")
    with pytest.raises(CheckpointError, match=message):
        fit(config, resume=True)
    forget_layout()
    held_out = f"data.eval.path={task / 'data' / 'test.parquet'}"
    with pytest.raises(CheckpointError, match=message):
        evaluate(
            configure(task, tmp_path / "run", *GVPO, *SHORT, held_out, f"model.path={other}"), resume=True
        )
    forget_layout()
    with pytest.raises(CheckpointError, match=message):
        conversion.checkpoint_to_hugging_face(config, tmp_path / "hf")
    forget_layout()
    larger = changed(task / "model", tmp_path / "larger", with_more_tokens, vocab_size=24)
    assert main(["convert", str(checkpoint), str(tmp_path / "hf"), "--like", str(larger)]) == 1
    message = "is of a model with vocab_size=20 in its config.json, and the model here has 24"
    assert message in capfd.readouterr().err
    assert not (tmp_path / "hf").exists()
