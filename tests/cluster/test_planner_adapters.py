"""The planner's count of adapters against transformers, and their memory against a model's own."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from helpers.cases.families import FAMILIES

from megatron_gvpo.cli import main
from megatron_gvpo.planner import architecture, memory_model
from megatron_gvpo.planner.workload import Layout
from megatron_gvpo.settings.adapter import TARGETS
from megatron_gvpo.settings.config import load_config

KNOWN = json.loads(resources.files("megatron_gvpo.planner").joinpath("models.json").read_text())
RANK = 16


# Kimi K2's architecture is DeepSeek-V3's, which is in KNOWN.
NEWER = {f.architecture: f.released for f in FAMILIES if f.architecture in TARGETS and f.title != "Kimi K2"}


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", *NEWER]
)
def test_adapters_are_counted_as_their_layers_are_in_transformers(name: str) -> None:
    """A linear layer [out, in] gets rank x (out + in); transformers keeps all experts in two tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict({**KNOWN, **NEWER}[name])
    counts = architecture.from_config(values, name)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    targets, counted = TARGETS[values["architectures"][0]], 0
    for full, parameter in model.named_parameters():
        shape = parameter.shape
        if full.endswith("experts.gate_up_proj") and "up_proj" in targets:
            counted += shape[0] * 2 * (shape[1] // 2 + shape[2])
        elif full.endswith("experts.down_proj") and "down_proj" in targets:
            counted += shape[0] * (shape[1] + shape[2])
        elif full.endswith(".weight") and full.split(".")[-2] in targets:
            counted += sum(shape)
    assert replace(counts, adapter_rank=RANK).adapters == pytest.approx(RANK * counted, rel=1e-12)


@pytest.mark.parametrize("layout", [Layout(8), Layout(8, tp=2, pp=2), Layout(16, tp=4, pp=2, ep=2)])
def test_gradients_and_optimizer_states_are_those_of_adapters(layout: Layout) -> None:
    model = architecture.load("Qwen/Qwen3-30B-A3B")
    adapted = replace(model, adapter_rank=RANK)
    stages = range(layout.pp)
    trained = [memory_model.trained_shard(adapted, layout, stage).total for stage in stages]
    total = sum(
        memory_model.trained_shard(adapted, layout, s).dense * layout.tp
        + memory_model.trained_shard(adapted, layout, s).experts * layout.ep
        for s in stages
    )
    assert total == pytest.approx(adapted.adapters)
    for stage in stages:
        of_model, of_adapters = (memory_model.state(m, layout, stage) for m in (model, adapted))
        assert of_adapters[0] == pytest.approx(of_model[0] + 2 * trained[stage])
        assert of_adapters[1] == 4 * trained[stage] < 0.1 * of_model[1]
        assert of_adapters[2] < 0.1 * of_model[2]


def test_a_critic_trains_all_of_its_weights() -> None:
    layout, model = Layout(8, tp=2), architecture.load("Qwen/Qwen3-8B")
    adapted = replace(model, adapter_rank=RANK)
    critics = [memory_model.state(m, layout, 0, critic=True) for m in (model, adapted)]
    assert critics[0] == critics[1]


def test_a_plan_with_adapters_is_a_configuration(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = (
        "--model Qwen/Qwen2.5-7B --gpus 8 --gpu h800 --k 5 --prompts 1024 --response-length 850,p95=2000"
    )
    out, answers = tmp_path / "plan.yaml", []
    for rank in (0, 32):
        assert (
            main(["plan", *options.split(), "--adapter-rank", str(rank), "--write", str(out), "--json"]) == 0
        )
        answers.append(json.loads(capsys.readouterr().out))
    of_model, adapted = (answer["best"][0]["predicted_gib"] for answer in answers)
    assert (
        adapted["optimizer"] < 0.1 * of_model["optimizer"]
        and adapted["gradients"] < 0.1 * of_model["gradients"]
    )
    assert (
        answers[1]["adapter_parameters"]
        == replace(architecture.load("Qwen/Qwen2.5-7B"), adapter_rank=32).adapters
    )
    adapter = load_config([task / "run.yaml", out], ["output_dir=x"]).model.adapter
    assert adapter is not None and (adapter.rank, adapter.alpha) == (32, 32)
    assert main(["plan", *options.split(), "--adapter-rank", "32"]) == 0
    assert "MiB of adapters alone" in " ".join(capsys.readouterr().out.split())
