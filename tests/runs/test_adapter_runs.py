"""Whole runs that train adapters: what they write, resume from and refuse; how merging rounds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from helpers.tiny_run import SHORT, StopAfter, assert_same_run, configure, fit, records, weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_gvpo.core.errors import CheckpointError, ConfigError
from megatron_gvpo.megatron.adapters.directory import read_adapter
from megatron_gvpo.megatron.adapters.tensors import MergeRounding
from megatron_gvpo.training.conversion import checkpoint_to_hugging_face

pytestmark = pytest.mark.usefixtures("leave_the_process_group")
FIXED = ("algorithm=gvpo", "algorithm.loss.reference=fixed", "train.mini_batches=2")
LAYERS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
ADAPTER = ("model.adapter={rank: 4, alpha: 8}", "checkpoint.every=2", "checkpoint.keep=5")


@pytest.fixture(scope="module")
def finished(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    out = tmp_path_factory.mktemp("adapters") / "finished"
    trainer = fit(configure(task, out, *FIXED, *ADAPTER))
    assert trainer.components.policy.reference is None, "the fixed reference has no weights of its own"
    return out


def adapter_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "adapter_model.safetensors")


def test_the_export_is_the_base_with_its_adapters_merged(task: Path, finished: Path) -> None:
    base, merged = load_file(task / "model" / "model.safetensors"), weights(finished)
    adapters, moved = adapter_of(finished / "hf" / "adapter"), 0
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        change = torch.zeros_like(weight)
        if f"{stem}.lora_A.weight" in adapters:
            change = 2 * adapters[f"{stem}.lora_B.weight"] @ adapters[f"{stem}.lora_A.weight"]
            moved += bool(change.any())
        torch.testing.assert_close(merged[name], weight + change, rtol=0, atol=1e-6)
    assert moved > 0


def test_the_embedded_engine_samples_with_the_adapters(finished: Path) -> None:
    """Its log-probs are the trainer's, step after step; without the adapters they would drift away."""
    gaps = [line["mismatch/kl"] for line in records(finished) if "mismatch/kl" in line]
    assert gaps and max(gaps) < 1e-6


def test_a_checkpoint_is_small_and_says_what_it_is(task: Path, finished: Path) -> None:
    step = finished / "checkpoints" / "step_00000004"
    record = json.loads((step / "state.json").read_text())["adapter"]
    assert (record["type"], record["rank"], record["alpha"]) == ("canonical_lora", 4, 8)
    assert record["base"]["bytes"] > 0 and len(record["base"]["sha256"]) == 64
    checkpoint_bytes = sum(file.stat().st_size for file in step.rglob("*.distcp"))
    assert checkpoint_bytes < 0.5 * (task / "model" / "model.safetensors").stat().st_size


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    task: Path, finished: Path, tmp_path: Path
) -> None:
    config = configure(task, tmp_path, *FIXED, *ADAPTER)
    fit(config, [StopAfter(2)])
    fit(config, resume=True)
    assert_same_run(finished, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("base", "adapters for another base model than model.path"),
        ("alpha", "has adapters with alpha=8, and model.adapter has 16"),
        ("none", r"holds adapters, and model.adapter is missing: .* in .*/out/config.yaml"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(
    task: Path, finished: Path, tmp_path: Path, change: str, message: str
) -> None:
    out, overrides = tmp_path / "out", [*FIXED, *ADAPTER]
    shutil.copytree(finished, out)
    if change == "base":
        shutil.copytree(task / "model", tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
        tensors = load_file(file)
        next(iter(tensors.values()))[0] += 1
        save_file(tensors, file, metadata={"format": "pt"})
        overrides.append(f"model.path={tmp_path / 'model'}")
    if change == "alpha":
        overrides[len(FIXED)] = "model.adapter={rank: 4, alpha: 16}"
    if change == "none":
        overrides[len(FIXED)] = "model.adapter=null"
    with pytest.raises(CheckpointError, match=message):
        checkpoint_to_hugging_face(configure(task, out, *overrides), tmp_path / "hf")


def test_adapters_are_exported_alone_and_another_run_starts_from_them(
    task: Path, finished: Path, tmp_path: Path
) -> None:
    """A fixed reference is then the adapters that the run began with, so it has weights of its own."""
    alone = tmp_path / "adapter"
    checkpoint_to_hugging_face(configure(task, finished, *FIXED, *ADAPTER), alone, None, adapter_only=True)
    alone_by_name, exported_by_name = adapter_of(alone), adapter_of(finished / "hf" / "adapter")
    assert sorted(file.name for file in alone.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert alone_by_name.keys() == exported_by_name.keys() and all(
        torch.equal(alone_by_name[n], exported_by_name[n]) for n in alone_by_name
    )
    path = f"model.adapter.path={alone}"
    config = configure(task, tmp_path / "out", *FIXED, *SHORT, *ADAPTER, path, "train.steps=1")
    trainer = fit(config)
    assert trainer.components.policy.reference is not None
    assert records(tmp_path / "out")[-1]["train/grad_norm"] > 0
    without = configure(task, tmp_path / "out", *FIXED, *SHORT, *ADAPTER, "train.steps=2")
    with pytest.raises(CheckpointError, match=r"adapter\.path is missing: the reference would be the base"):
        fit(without, resume=True)


def test_a_reference_that_the_checkpoint_lacks_is_no_damage(
    task: Path, finished: Path, tmp_path: Path
) -> None:
    """The run's reference was the base model; resumed with adapters to begin with, it would be those."""
    shutil.copytree(finished, tmp_path / "out")
    path = f"model.adapter.path={finished / 'hf' / 'adapter'}"
    with pytest.raises(CheckpointError, match="step_00000004 has no weights of a reference policy"):
        fit(configure(task, tmp_path / "out", *FIXED, *ADAPTER, path, "train.steps=5"), resume=True)


def broken(directory: Path, change: str) -> None:
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = adapter_of(directory)
    first = sorted(tensors)[0]
    if change == "missing":
        del tensors[first]
    if change == "unexpected":
        tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = tensors[first].clone()
    if change == "shape":
        tensors[first] = tensors[first][:, :-1].contiguous()
    if change == "nan":
        tensors[first][0, 0] = float("nan")
    if change == "integers":
        tensors[first] = torch.ones_like(tensors[first], dtype=torch.int8)
    others: dict[str, dict[str, object]] = {
        "rank": {"r": 8},
        "dora": {"use_dora": True},
        "targets": {"target_modules": ["q_proj"]},
        "late": {"alora_invocation_tokens": [3, 4]},
        "unknown": {"some_later_option": 2},
    }
    config |= others.get(change, {})
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nan", "values that are NaN or infinite"),
        ("integers", r"is of torch\.int8: want float32, bfloat16"),
        ("rank", "r=8 in adapter_config.json, and model.adapter.rank=4"),
        ("dora", "use_dora=True in adapter_config.json"),
        ("targets", "set model.adapter.targets="),
        ("late", r"alora_invocation_tokens=\[3, 4\] in adapter_config.json changes the adapter"),
        ("unknown", "some_later_option=2 in adapter_config.json changes the adapter"),
        ("none", "no adapter_config.json there"),
    ],
)
def test_a_directory_of_another_kind_is_refused(
    task: Path, finished: Path, tmp_path: Path, change: str, message: str
) -> None:
    directory = tmp_path / "adapter"
    if change == "none":
        directory.mkdir()
    else:
        shutil.copytree(finished / "hf" / "adapter", directory)
        broken(directory, change)
    options = configure(task, tmp_path, *ADAPTER).model.adapter
    assert options is not None
    with pytest.raises(ConfigError, match=message):
        read_adapter(directory, options, LAYERS)


@pytest.mark.parametrize(("init", "refused"), [("pissa", True), ("olora", True), ("gaussian", False)])
def test_adapters_that_peft_takes_out_of_the_base_are_refused(
    task: Path, tmp_path: Path, init: str, refused: bool
) -> None:
    """PEFT's model is the base less the first values, plus the adapter; ours is the base plus the adapter."""
    peft_options = {"r": 4, "lora_alpha": 8, "target_modules": list(LAYERS), "init_lora_weights": init}
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    tuned = peft.get_peft_model(model, peft.LoraConfig(**peft_options))
    tuned.save_pretrained(tmp_path)
    after = tuned.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert torch.equal(before, after) != refused
    options = configure(task, tmp_path / "out", *ADAPTER).model.adapter
    assert options is not None
    if not refused:
        assert read_adapter(tmp_path, options, LAYERS)
        return
    with pytest.raises(ConfigError, match=rf"init_lora_weights='{init}' .* changes the base model"):
        read_adapter(tmp_path, options, LAYERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "it lacks 1 tensor"),
        ("unexpected", "it has 1 tensor .*layers.9.mlp.up_proj"),
        ("shape", "has shape"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(
    task: Path, finished: Path, tmp_path: Path, change: str, message: str
) -> None:
    directory = tmp_path / "adapter"
    shutil.copytree(finished / "hf" / "adapter", directory)
    broken(directory, change)
    path = f"model.adapter.path={directory}"
    with pytest.raises(ConfigError, match=message):
        fit(configure(task, tmp_path / "out", *FIXED, *SHORT, *ADAPTER, path))


def test_a_damaged_tensor_is_named(task: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "hf" / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    options = configure(task, tmp_path, *ADAPTER).model.adapter
    assert options is not None
    with pytest.raises(ConfigError, match="is not what was saved"):
        read_adapter(tmp_path / "adapter", options, LAYERS)


def test_a_run_says_that_merging_rounds_its_updates_away(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = ("model.dtype=bfloat16", "optimizer.lr=1e-6", "optimizer.warmup_steps=0", "train.steps=1")
    fit(configure(task, tmp_path, *FIXED, *SHORT, *ADAPTER, *small))
    assert caplog.text.count("of the adapters' change") == 1


@pytest.mark.parametrize(("size", "warns"), [(1e-6, True), (1e-1, False)])
def test_a_merge_that_rounds_the_change_away_is_told(
    size: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    base = (0.02 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    change, rounding = torch.full((64, 64), size), MergeRounding()
    rounding.add(base, (base.float() + change).bfloat16(), change)
    assert rounding.warn() == warns
    assert ("of the adapters' change" in caplog.text) == warns
    assert rounding.share < 0.3 if warns else 0.98 < rounding.share < 1.02


@pytest.mark.parametrize(
    ("rate", "updates", "arrives"), [(1e-5, 1, 0.02), (1e-5, 10, 0.21), (1e-4, 10, 0.96)]
)
def test_small_changes_arrive_as_the_page_says(rate: float, updates: int, arrives: float) -> None:
    """Adam moves each element of B by the rate, at most. A is drawn as in a new adapter."""
    generator = torch.Generator().manual_seed(0)
    base = (0.02 * torch.randn(512, 2048, generator=generator)).bfloat16()
    a = torch.empty(32, 2048).uniform_(-1, 1, generator=generator) / 2048**0.5
    b = torch.randn(512, 32, generator=generator).sign()
    change, rounding = updates * rate * b @ a, MergeRounding()
    rounding.add(base, (base.float() + change).bfloat16(), change)
    assert rounding.share == pytest.approx(arrives, abs=0.01)
