"""Rank function of test_leftovers.py: the bytes that stay allocated after passes over micro-batches."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.distributed as dist

from helpers.distributed import forget_layout, run_number
from helpers.workers.gradient_worker import config_of


def run(directory: str) -> None:
    """Run case number `run_number()` of work.pt; every rank writes {number}-{rank}.pt."""
    from megatron_gvpo.megatron.memory_profile import _CPU
    from megatron_gvpo.megatron.policy import Policy

    folder, number = Path(directory), run_number()
    layout, case = torch.load(folder / "work.pt", weights_only=False)[number]
    policy = Policy.of(config_of(case, layout, folder))
    optimizer = policy.optimizer
    permanent = [*policy.model.weights(), *policy.model.gradient_buffers(), *optimizer.tensors()]
    leftovers: dict[str, int] = {}
    with _CPU(permanent) as meter:
        for name, call in (
            ("update", lambda: policy.update(case.rows, at_step_start=False)),
            ("score", lambda: policy.score(case.rows)),
        ):
            call()
            gc.collect()
            leftovers[name] = meter.level
    leftovers["peak"] = meter.peak
    torch.save(leftovers, folder / f"{number}-{dist.get_rank()}.pt")
    forget_layout()
