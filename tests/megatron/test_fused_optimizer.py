"""The optimizer with the bookkeeping of Transformer Engine's FusedAdam, which itself needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.gradient_cases import STEPS, sampled_for
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from references import gradient_reference as reference
from test_precision import bf16_policy, states
from workers.gradient_worker import Case

import megatron_gvpo.megatron.parallel  # noqa: F401 - before megatron.core
from megatron_gvpo.megatron.checkpoint import sharded as checkpoint


class Fused(torch.optim.Optimizer):
    """Adam that counts steps by group, as numbers, and has no moments before its first step (TE 2.20)."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (a, b), t = group["betas"], group["step"]
            for p in (p for p in group["params"] if p.grad is not None):
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p].setdefault(name, torch.zeros_like(p))
                first, second = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                first.lerp_(p.grad, 1 - a)
                second.lerp_(p.grad**2, 1 - b)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * first / (1 - a**t) / ((second / (1 - b**t)).sqrt() + group["eps"]))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_optimizer, "Adam", Fused)
    monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    for name, value in {"Adam": Fused, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}.items():
        monkeypatch.setattr(distrib_optimizer, name, value)


@pytest.mark.parametrize("saved_at", [0, 2])
def test_a_run_that_goes_on_repeats_the_one_that_was_saved(fused: None, tmp_path: Path, saved_at: int):
    """This also holds before any training: a run may be stopped during its first rollout."""
    reference.save_models(tmp_path)
    name = "gvpo, groups split"
    rows, *_ = sampled_for(STEPS[name], tmp_path)
    case = Case(name, STEPS[name].algorithm, rows, STEPS[name].budget)
    updates = range(saved_at, 3)
    with bf16_policy(case, tmp_path, 0.0) as policy:
        for _ in range(saved_at):
            policy.update(rows, at_step_start=False)
        checkpoint.save(tmp_path, saved_at, policy, {}, keep=1)
        assert policy.optimizer.steps == saved_at
        wanted = [policy.update(rows, at_step_start=False) for _ in updates]
        trained = states(policy)
    with bf16_policy(case, tmp_path, 0.0) as policy:
        checkpoint.load(tmp_path / f"step_0000000{saved_at}", policy)
        found = [policy.update(rows, at_step_start=False) for _ in updates]
        assert [(r.metrics, r.update) for r in found] == [(r.metrics, r.update) for r in wanted]
        assert policy.optimizer.steps == 3
        for key, tensor in states(policy).items():
            assert torch.equal(tensor, trained[key]), key
