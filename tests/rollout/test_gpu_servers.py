"""Command lines of servers on GPUs, made without one, and the experts that patches must not touch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_gvpo.config.schema import load_config
from megatron_gvpo.rollout.server import PLUGINS
from megatron_gvpo.rollout.vllm import VLLM

DENSE = {"architectures": ["Qwen3ForCausalLM"]}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}


def arguments(good: Path, model: dict[str, object], *overrides: str, on_gpu: bool = True) -> str:
    (good.parent / "config.json").write_text(json.dumps(model))
    config = load_config([good], [f"model.path={good.parent}", "rollout.engine=vllm", *overrides])
    return " ".join(VLLM.launch(config, 1, None, on_gpu).command)


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
