"""The optimizer with Transformer Engine's FusedAdam: its Python source is real, its kernel is a reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.cases.gradient_cases import STEPS, sampled_for
from helpers.references import gradient_reference as reference
from helpers.references.transformer_engine_source import loaded
from helpers.workers.gradient_worker import Case
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from test_precision import bf16_policy, states
from torch import Tensor

import megatron_gvpo.megatron.parallel  # noqa: F401 - before megatron.core
from megatron_gvpo.megatron.checkpoint.load import load_policy
from megatron_gvpo.megatron.checkpoint.save import save_policy
from megatron_gvpo.megatron.memory_profile import GIB
from megatron_gvpo.megatron.policy import Policy


@torch.no_grad()
def adam(
    kernel: object,
    overflow: Tensor,
    tensors: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    corrects_bias: int,
    weight_decay: float,
) -> None:
    """The kernel `multi_tensor_adam`, as its C++ source has it for AdamW with corrected bias."""
    assert decoupled and corrects_bias
    for gradient, parameter, first, second in zip(*tensors, strict=True):
        first.lerp_(gradient, 1 - beta1)
        second.lerp_(gradient**2, 1 - beta2)
        denominator = (second / (1 - beta2**step)).sqrt() + eps
        parameter.sub_(lr * (first / (1 - beta1**step) / denominator + weight_decay * parameter))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[torch.optim.Optimizer]]:
    """Transformer Engine's own class, whose kernel alone is replaced, as Megatron's optimizer."""
    with loaded("pytorch/optimizers/fused_adam.py") as module:
        module.__dict__["multi_tensor_applier"] = adam
        monkeypatch.setattr(megatron_optimizer, "Adam", module.FusedAdam)
        monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
        own = {"Adam": module.FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}
        for name, value in own.items():
            monkeypatch.setattr(distrib_optimizer, name, value)
        yield module.FusedAdam


def addresses(policy: Policy) -> list[int]:
    return [tensor.data_ptr() for tensor in (*policy.optimizer.tensors(), *policy.optimizer.host_tensors())]


@pytest.mark.parametrize("saved_at", [0, 2])
def test_a_run_that_goes_on_repeats_the_one_that_was_saved(fused: type, tmp_path: Path, saved_at: int):
    """This also holds before any training: a run may be stopped during its first rollout."""
    reference.save_models(tmp_path)
    name = "gvpo, groups split"
    rows, *_ = sampled_for(STEPS[name], tmp_path)
    case = Case(name, STEPS[name].algorithm, rows, STEPS[name].budget)
    updates = range(saved_at, 3)
    with bf16_policy(case, tmp_path, 0.0) as policy:
        for _ in range(saved_at):
            policy.update(rows, at_step_start=False)
        save_policy(tmp_path, saved_at, policy, {}, keep=1)
        assert policy.optimizer.steps == saved_at
        wanted = [policy.update(rows, at_step_start=False) for _ in updates]
        trained = states(policy)
    with bf16_policy(case, tmp_path, 0.0) as policy:
        addresses_before = addresses(policy)
        load_policy(tmp_path / f"step_0000000{saved_at}", policy)
        assert addresses(policy) == addresses_before, "loaded in place"
        results = [policy.update(rows, at_step_start=False) for _ in updates]
        assert [(r.metrics, r.update) for r in results] == [(r.metrics, r.update) for r in wanted]
        assert policy.optimizer.steps == 3
        for key, tensor in states(policy).items():
            assert torch.equal(tensor, trained[key]), key


@pytest.mark.parametrize("offload", [0.0, 0.5])
def test_its_moments_are_there_from_the_build_on(fused: type, tmp_path: Path, offload: float) -> None:
    """They are what its own `initialize_state` makes, and the memory of the first update has them."""
    reference.save_models(tmp_path, ["untied"])
    name = "gvpo, groups split"
    rows, *_ = sampled_for(STEPS[name], tmp_path)
    with bf16_policy(
        Case(name, STEPS[name].algorithm, rows, STEPS[name].budget), tmp_path, offload
    ) as policy:
        on_device = [inner for inner, on_host in policy.optimizer._inner() if not on_host]
        assert [type(inner) for inner in on_device] == [fused]
        for inner in on_device:
            for parameter, state in list(inner.state.items()):
                inner.state[parameter] = {}
                inner.initialize_state(parameter, False)
                for moment, wanted in inner.state[parameter].items():
                    torch.testing.assert_close(state[moment], wanted, rtol=0, atol=0)
                    assert not wanted.any()
                inner.state[parameter] = state
        addresses_before, device_bytes = (
            addresses(policy),
            sum(tensor.nbytes for tensor in policy.optimizer.tensors()),
        )
        weight_bytes = sum(weight.nbytes for weight in policy.model.weights())
        # A master and two moments in fp32, beside a weight in bf16.
        assert device_bytes == pytest.approx(6 * (1 - offload) * weight_bytes, rel=0.02 + 0.3 * offload)
        memory = policy.update(rows, at_step_start=False).memory
        assert memory["memory/optimizer_gib"] * GIB == device_bytes
        parts = ("weights", "gradients", "optimizer", "activations")
        assert memory["memory/peak_gib"] >= sum(memory[f"memory/{part}_gib"] for part in parts)
        assert addresses(policy) == addresses_before
        trained = states(policy)
        policy.memory.release("training")
        assert not any(tensor.untyped_storage().nbytes() for tensor in policy.optimizer.tensors())
        policy.memory.restore("training")
        assert all(torch.equal(tensor, trained[key]) for key, tensor in states(policy).items())
