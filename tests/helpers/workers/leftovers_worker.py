"""Rank function of test_leftovers.py: the bytes that live on after passes over micro-batches."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import forget_layout, run_number

from workers.gradient_worker import config_of


def run(directory: str) -> None:
    """Run case number `run_number()` of work.pt; every rank writes {number}-{rank}.pt."""
    from megatron_gvpo.megatron.memory_profile import _CPU
    from megatron_gvpo.megatron.policy import Policy

    place, number = Path(directory), run_number()
    layout, case = torch.load(place / "work.pt", weights_only=False)[number]
    policy = Policy(config_of(case, layout, place))
    optimizer = policy.optimizer
    permanent = [*policy.model.weights(), *policy.model.gradient_buffers(), *optimizer.tensors()]
    left: dict[str, int] = {}
    with _CPU(permanent) as meter:
        for name, call in (
            ("update", lambda: policy.update(case.rows, at_step_start=False)),
            ("score", lambda: policy.score(case.rows)),
        ):
            call()
            gc.collect()
            left[name] = meter.level
    left["peak"] = meter.peak
    torch.save(left, place / f"{number}-{dist.get_rank()}.pt")
    forget_layout()
