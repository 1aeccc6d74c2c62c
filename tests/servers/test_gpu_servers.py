"""Command lines of servers on GPUs, made without one, and what patches touch there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.servers.real_servers import ENGINES, engine_python

from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.servers.vllm import VLLM
from megatron_gvpo.settings.config import load_config

DENSE = {"architectures": ["Qwen3ForCausalLM"]}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}


def arguments(good: Path, model: dict[str, object], *overrides: str, on_gpu: bool = True) -> str:
    (good.parent / "config.json").write_text(json.dumps(model))
    config = load_config([good], [f"model.path={good.parent}", "rollout.engine=vllm", *overrides])
    return " ".join(VLLM.launch(config.model, config.rollout, ModelCards(config), 1, None, on_gpu).command)


def test_a_colocated_vllm_leaves_the_trainers_share_free(good: Path) -> None:
    """vLLM takes 0.92 of a GPU by default and fails where less is free; the user's own share comes last."""
    shared = ("rollout.servers.colocated=true", "rollout.weights.transport=shared")
    own = "rollout.servers.args=[--gpu-memory-utilization, '0.5']"
    assert "--gpu-memory-utilization 0.85" in arguments(good, DENSE, *shared)
    assert arguments(good, DENSE, *shared, own).endswith("--gpu-memory-utilization 0.5")
    assert "--gpu-memory-utilization" not in arguments(good, DENSE)
    assert "--gpu-memory-utilization" not in arguments(good, DENSE, *shared, on_gpu=False)


@pytest.mark.parametrize(
    ("model", "transport", "on_gpu", "triton"),
    [
        (EXPERTS, "delta", True, True),
        (EXPERTS, "broadcast", True, False),
        (DENSE, "delta", True, False),
        (EXPERTS, "delta", False, False),
    ],
)
def test_patched_experts_are_kept_as_they_load(
    good: Path, model: dict[str, object], transport: str, on_gpu: bool, triton: bool
) -> None:
    command = arguments(good, model, f"rollout.weights.transport={transport}", on_gpu=on_gpu)
    assert ("--moe-backend triton" in command) == triton


def test_patches_of_rearranged_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are those of vLLM's backends, which tests/shipping/test_gpu_interfaces.py checks."""
    monkeypatch.syspath_prepend(PLUGINS)
    from megatron_gvpo_patches import refuse_rearranged_experts

    def model(backend: str) -> torch.nn.Module:
        layers = torch.nn.ModuleDict({"experts": torch.nn.Module(), "norm": torch.nn.Linear(2, 2)})
        layers["experts"].quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
        return layers

    for backend in ("TRITON", "BATCHED_TRITON"):
        refuse_rearranged_experts(model(backend))
    for backend in ("FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM"):
        with pytest.raises(
            RuntimeError, match=rf"cannot patch experts: .* {backend}, .* --moe-backend triton"
        ):
            refuse_rearranged_experts(model(backend))


def in_vllm(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in the environment of vLLM, with the servers' plugins."""
    script = directory / "program.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(PLUGINS)}
    return subprocess.run(
        [engine_python("vllm"), str(script)], env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.proof
def test_what_attention_derives_from_its_weights_is_derived_again_after_patches(tmp_path: Path) -> None:
    """In vLLM's own process, with its class of layers that derive: those of latent attention need a GPU."""
    completed = in_vllm(PATCHED, tmp_path)
    assert completed.stdout.splitlines()[-1:] == ["4.0"], completed.stderr[-2000:]


def test_vllm_turns_all_heads_of_latent_attention_on_a_cpu(good: Path) -> None:
    """Its compiled kernel takes them for one. GLM-4.7-Flash has it in test_family_servers.py, a proof."""
    latent = {"architectures": ["Glm4MoeLiteForCausalLM"], "kv_lora_rank": 512}
    own = '{"custom_ops": ["-rotary_embedding"]}'
    assert own in arguments(good, latent, on_gpu=False)
    assert own not in arguments(good, latent) and own not in arguments(good, DENSE, on_gpu=False)


@pytest.mark.proof
def test_vllm_reloads_weights_whose_loader_has_no_name(tmp_path: Path) -> None:
    """In vLLM's own process: MiniMax-M2's norms have such loaders, and its CPU build does not run it."""
    completed = in_vllm(NAMELESS, tmp_path)
    assert completed.stdout.splitlines()[-1:] == ["[6.0, 6.0]"], completed.stderr[-2000:]


NAMELESS = """
import functools

import torch
from megatron_gvpo_vllm import Receiver
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading


def load(param, loaded, times):
    param.data.copy_(times * loaded)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.weight.weight_loader = functools.partial(load, times=2)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.weight.weight_loader(self.weight, tensor)


receiver = Receiver.__new__(Receiver)
receiver.model, receiver.model_config, receiver.device = Norm(), None, torch.device("cpu")
record_metadata_for_reloading(receiver.model)
receiver._reload()
receiver._load([("weight", torch.full((2,), 3.0))])
receiver.finish_weight_update()
print(receiver.model.weight.tolist())
"""


@pytest.mark.proof
@pytest.mark.parametrize("engine", ENGINES)
def test_convolutions_of_delta_nets_keep_what_a_patch_does_not_name(engine: str, tmp_path: Path) -> None:
    """In the engine's own process, with its loader, which writes by index, and only on GPUs in place."""
    script = tmp_path / "patched.py"
    script.write_text(CONVOLUTION.replace("LOADERS", LOADERS[engine]))
    environment = {**os.environ, "PYTHONPATH": str(PLUGINS)}
    completed = subprocess.run(
        [engine_python(engine), str(script)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert completed.stdout.splitlines()[-1:] == ["[0.0, 9.0, 2.0, 3.0, 4.0, 5.0]"], completed.stderr[-2000:]


LOADERS = {
    "sglang": "sglang.srt.layers.attention.mamba.mamba",
    "vllm": "vllm.model_executor.layers.mamba.mamba_mixer2",
}
CONVOLUTION = """
import torch
from LOADERS import mamba_v2_sharded_weight_loader
from megatron_gvpo_patches import apply_patches, check_patched


class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(6, 1, 1), requires_grad=False)

    def load_weights(self, weights):
        loader = mamba_v2_sharded_weight_loader([(2, 0, False)] * 3, 1, 0)
        for _, tensor in weights:
            loader(self.weight, tensor)


parts = torch.tensor([1], dtype=torch.int32), torch.tensor([9.0])
wire = torch.cat([part.view(torch.uint8) for part in parts])
model = Convolution()
apply_patches(model, wire, [["weight", "float32", [6, 1, 1], 1]])
check_patched(model)
print(model.weight.flatten().tolist())
"""
PATCHED = """
from types import SimpleNamespace

import torch
from megatron_gvpo_patches import apply_patches
from megatron_gvpo_vllm import Receiver
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.utils import replace_parameter


class Latent(torch.nn.Module, AttentionLayerBase):
    def __init__(self):
        super().__init__()
        self.kv_b_proj = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.process_weights_after_loading(torch.float32)

    def process_weights_after_loading(self, act_dtype):
        replace_parameter(self, "W_UK_T", 2 * self.kv_b_proj.detach(), prefer_copy=True)

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)

    get_attn_backend = get_kv_cache_spec = None


receiver = Receiver.__new__(Receiver)
receiver.model, receiver.model_config = Latent(), SimpleNamespace(dtype=torch.float32)
parts = torch.tensor([1], dtype=torch.int32), torch.tensor([2.0])
wire = torch.cat([part.view(torch.uint8) for part in parts])
apply_patches(receiver.model, wire, [["kv_b_proj", "float32", [2], 1]])
receiver._patched = True
receiver.finish_weight_update()
print(receiver.model.W_UK_T[1].item())
"""


def test_temperatures_are_spread_over_drafted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that takes the place of vLLM's on CPUs; real servers need it in test_speculation.py."""
    monkeypatch.syspath_prepend(PLUGINS)
    from megatron_gvpo_mends import expand

    spread = torch.full((5,), float("nan"))
    expand(spread, torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32), 0, 1)
    assert spread.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    expand(spread, torch.tensor([0.0, 0.7]), torch.tensor([1, 5], dtype=torch.int32), 0, 1)
    torch.testing.assert_close(spread, torch.tensor([1.0, 0.7, 0.7, 0.7, 0.7]))
