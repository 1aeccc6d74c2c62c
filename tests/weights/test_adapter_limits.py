"""Adapters that an engine would not serve are refused before a server starts, and shapes before a push."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers.pushes.adapter_pushes import RANK, make_adapter
from helpers.servers.real_servers import ENGINES
from helpers.tiny_run import configure
from safetensors.torch import load_file

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.adapter_layers import adapted_layers, adapter_shapes, check_limits
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.complete_weights import stored_tensors
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.settings.config import Config
from megatron_gvpo.weights.transport import PushSettings, transport_class


def configured(task: Path, tmp_path: Path, engine: str, adapter: str, *more: str) -> Config:
    overrides = (f"rollout.engine={engine}", "rollout.weights.transport=adapter", f"model.adapter={adapter}")
    return configure(task, tmp_path, *overrides, *more)


def pushed(config: Config) -> PushSettings:
    return PushSettings.of(
        config.model, config.rollout, config.output_dir, ModelCards(config), torch.device("cpu")
    )


@pytest.mark.parametrize(
    ("engine", "adapter", "more", "message"),
    [
        ("vllm", "{rank: 1024}", (), r"rank=1024: vLLM serves adapters of rank 512 at most"),
        ("sglang", "{targets: [k_proj]}", (), "no adapter of k_proj without one of q_proj"),
        ("sglang", "{targets: [q_proj, o_proj]}", (), "no adapter of q_proj without one of v_proj"),
        ("sglang", "{targets: [up_proj]}", (), "no adapter of up_proj without one of gate_proj"),
        ("vllm", "{}", ("rollout.servers.model_path=/other",), "model_path=/other: with .*transport=adapter"),
    ],
)
def test_what_an_engine_does_not_serve_is_refused(
    task: Path, tmp_path: Path, engine: str, adapter: str, more: tuple[str, ...], message: str
):
    config = configured(task, tmp_path, engine, adapter, *more)
    with pytest.raises(ConfigError, match=message):
        transport_class("adapter").check(pushed(config))


def test_an_adapter_that_vllm_leaves_out_when_it_decodes_is_refused(task: Path, tmp_path: Path):
    """Latent attention decodes with W_UK and W_UV there, products of the base alone (vLLM 0.32)."""
    (model := tmp_path / "latent").mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))
    for engine, targets, refused in (
        ("vllm", "all", True),
        ("vllm", "[kv_b_proj]", True),
        ("vllm", "[q_a_proj, o_proj]", False),
        ("sglang", "all", False),
    ):
        config = configured(task, tmp_path, engine, f"{{targets: {targets}}}", f"model.path={model}")
        with pytest.raises(ConfigError, match="kv_b_proj") if refused else nullcontext():
            check_limits(config.rollout, config.model, ModelCards(config).policy)


def test_without_an_adapter_there_is_none_to_send(task: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"transport=adapter.*without model\.adapter none does"):
        configured(task, tmp_path, "sglang", "null")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("targets", ["all", "[q_proj, v_proj]", "[gate_proj]", "[o_proj, down_proj]"])
def test_what_both_engines_serve_is_accepted(task: Path, tmp_path: Path, engine: str, targets: str):
    transport_class("adapter").check(pushed(configured(task, tmp_path, engine, f"{{targets: {targets}}}")))


def test_the_servers_start_with_room_for_the_adapters(task: Path, tmp_path: Path):
    """vLLM takes some ranks only: the next larger one."""
    words = {}
    for engine in ENGINES:
        config = configured(task, tmp_path, engine, "{rank: 12, targets: [q_proj, v_proj]}")
        words[engine] = DIALECTS[engine].launch(
            config.model, config.rollout, ModelCards(config), 1, None, on_gpu=False
        )
        own = configure(task, tmp_path, f"rollout.engine={engine}")
        plain = DIALECTS[engine].launch(own.model, own.rollout, ModelCards(own), 1, None, False)
        assert "--enable-lora" in words[engine].command and "--enable-lora" not in plain.command
    sglang, vllm = words["sglang"].command, words["vllm"].command
    after = sglang[sglang.index("--lora-target-modules") + 1 :]
    assert after[:2] == ["q_proj", "v_proj"] and after[2].startswith("--")
    assert sglang[sglang.index("--max-lora-rank") + 1] == "12"
    assert vllm[vllm.index("--max-lora-rank") + 1] == "16"
    assert words["vllm"].environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_the_expected_tensors_are_those_of_hugging_face_peft(task: Path, tmp_path: Path):
    config = configured(task, tmp_path, "sglang", f"{{rank: {RANK}}}")
    made = load_file(make_adapter(task / "model", tmp_path / "a", 0) / "adapter_model.safetensors")
    stored = {name: tensor.shape for name, tensor in stored_tensors(task / "model", "model.path").items()}
    shapes, optional = adapter_shapes(stored, adapted_layers(config.model, ModelCards(config).policy), RANK)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in made.items()} and not optional


def test_a_colocated_server_keeps_the_base_while_it_sleeps(task: Path, tmp_path: Path):
    """Pushes bring adapters alone, so its own weights wait in host memory."""
    config = configured(task, tmp_path, "sglang", "{rank: 4}", "rollout.servers.colocated=true")
    launch = DIALECTS["sglang"].launch(config.model, config.rollout, ModelCards(config), 1, None, on_gpu=True)
    assert "--enable-weights-cpu-backup" in launch.command
