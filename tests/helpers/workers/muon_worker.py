"""Rank function of test_muon.py: updates by Muon under each layout, and what follows a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.distributed import forget_layout, run_number
from helpers.workers.gradient_worker import Case, Layout, config_of, sizes_of
from megatron_gvpo.settings.adapter import AdapterConfig
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.sections import MuonConfig


@dataclass(frozen=True)
class Job:
    """Updates of a model under a layout. `load`: a job from whose checkpoint this one starts."""

    model: str
    layout: Layout
    muon: tuple[tuple[str, Any], ...] = ()  # optimizer.muon
    adapter: tuple[tuple[str, Any], ...] = ()  # model.adapter; empty: all weights train
    load: Layout | None = None

    @property
    def file(self) -> str:
        options = "".join(f"-{value}" for _, value in self.muon) + "-adapter" * bool(self.adapter)
        return f"{self.model}{options}-{self.layout}" + (f"-from-{self.load}" if self.load else "")


@dataclass(frozen=True)
class Updates:
    """Weights (of adapters, if they train) under Hugging Face names, after one update and three more."""

    updated: dict[str, Tensor]
    grad_norms: list[float]
    losses: list[float]
    weights: dict[str, Tensor]
    moments: dict[str, int]  # elements by name of the moment, on rank 0
    matrices: int  # elements of Muon's weights on rank 0, of all ranks


def run(directory: str) -> None:
    """Run one job of work.pt; rank 0 writes its results."""
    folder = Path(directory)
    jobs, cases = torch.load(folder / "work.pt", weights_only=False)
    job: Job = jobs[run_number()]
    with sizes_of(job.layout):
        result = _updates(job, cases[job.model], folder)
    if dist.get_rank() == 0:
        torch.save(result, folder / f"{job.file}.pt")
    forget_layout()


def config_for(job: Job, case: Case, folder: Path) -> Config:
    config = config_of(case, job.layout, folder)
    optimizer = config.optimizer.model_copy(update={"muon": MuonConfig(**dict(job.muon))})
    model = config.model
    if job.adapter:
        model = model.model_copy(update={"adapter": AdapterConfig(**dict(job.adapter))})
    return config.model_copy(update={"optimizer": optimizer, "model": model})


def _updates(job: Job, case: Case, folder: Path) -> Updates:
    from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
    from megatron_gvpo.megatron.checkpoint.load import load_policy
    from megatron_gvpo.megatron.checkpoint.save import save_policy
    from megatron_gvpo.megatron.muon import is_matrix
    from megatron_gvpo.megatron.policy import Policy

    policy = Policy.of(config_for(job, case, folder))
    results = []

    def update() -> None:
        results.append(policy.update(case.rows, at_step_start=False))

    def weights() -> dict[str, Tensor]:
        named = policy.adapter_weights() if job.adapter else policy.weights()
        return {name: tensor.clone() for name, tensor in named}

    updated: dict[str, Tensor] = {}
    if job.load is None:
        update()
        updated = weights()
        save_policy(folder / f"{job.file}-checkpoint", 1, policy, {}, keep=1)
    else:
        source = Job(job.model, job.load, job.muon, job.adapter)
        load_policy(complete_checkpoints(folder / f"{source.file}-checkpoint")[-1], policy)
    moments: dict[str, int] = {}
    for inner, _ in policy.optimizer._inner():
        for state in inner.state.values():
            for name, tensor in state.items():
                if name != "step":
                    moments[name] = moments.get(name, 0) + tensor.numel()
    update()
    update()
    return Updates(
        updated,
        [result.update.grad_norm for result in results],
        [result.metrics["loss"] for result in results],
        weights(),
        moments,
        sum(p.numel() for p in policy.model.trained_weights() if is_matrix(p)),
    )
