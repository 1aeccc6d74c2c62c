"""Rank function of test_adapters.py: a real Policy with adapters, under each layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.distributed import run_number
from helpers.workers.gradient_worker import Case, Layout, config_of, sizes_of
from megatron_gvpo.settings.adapter import AdapterConfig
from megatron_gvpo.settings.config import Config


@dataclass(frozen=True)
class Job:
    """Adapters as in the directory `adapter`, under a layout. `load`: a job whose checkpoint is resumed."""

    model: str
    layout: Layout
    adapter: str
    settings: tuple[tuple[str, Any], ...]  # of model.adapter, without the path
    load: str | None = None

    @property
    def name(self) -> str:
        return f"{self.adapter}: {self.layout}" + (f" from {self.load}" if self.load else "")

    @property
    def file(self) -> str:
        return self.name.replace(": ", "_").replace(" ", "_")


def with_adapter(config: Config, **settings: Any) -> Config:
    adapter = AdapterConfig(**settings)
    return config.model_copy(update={"model": config.model.model_copy(update={"adapter": adapter})})


def run(directory: str) -> None:
    """Run one job; rank 0 writes its results."""
    from megatron.core import parallel_state

    folder = Path(directory)
    jobs, cases = torch.load(folder / "work.pt", weights_only=False)
    job: Job = jobs[run_number()]
    with sizes_of(job.layout):
        results = _results(job, cases[job.model], folder)
    if dist.get_rank() == 0:
        torch.save(results, folder / f"{job.file}.pt")
    parallel_state.destroy_model_parallel()


def _results(job: Job, case: Case, folder: Path) -> dict[str, Any]:
    from megatron_gvpo.megatron.checkpoint.load import load_policy
    from megatron_gvpo.megatron.checkpoint.save import save_policy
    from megatron_gvpo.megatron.gradient_export import export_gradients
    from megatron_gvpo.megatron.policy import Policy

    path = None if job.load else str(folder / job.adapter)
    config = with_adapter(config_of(case, job.layout, folder), path=path, **dict(job.settings))
    policy, rows = Policy.of(config), case.rows
    model = policy.model
    if job.load is not None:
        load_policy(folder / f"{job.load}-checkpoint" / "step_00000001", policy)
    frozen = [p.detach().clone() for p in model.weights() if not p.requires_grad]
    result: dict[str, Any] = {
        "trained": sum(p.numel() for p in model.trained_weights()),
        "buffers": sum(b.numel() for b in model.gradient_buffers()),
        "optimizer": sum(t.numel() for t in policy.optimizer.tensors()),
        "logp_r": policy.score(rows),
        "adapters": _copy(policy.adapter_weights()),
        "merged": _copy(policy.weights()),
        "config": model.adapters.config(),
    }
    with model.adapters.off():
        result["base_logp_r"] = policy.score(rows)
    if job.load is None:
        model.save_adapters(folder / f"{job.file}-saved")
    gradients: dict[str, Tensor] = {}
    apply = policy.optimizer.apply

    policy.optimizer.apply = lambda: gradients.update(export_gradients(model, policy.adapter_weights))
    policy.update(rows, at_step_start=case.at_step_start)
    policy.optimizer.apply = apply
    done = policy.update(rows, at_step_start=case.at_step_start)
    result |= {"loss": done.metrics["loss"], "grad_norm": done.update.grad_norm, "gradients": gradients}
    result |= {"updated_logp_r": policy.score(rows), "updated": _copy(policy.adapter_weights())}
    for part in ("training", "weights"):  # release the memory, as for a colocated engine
        policy.memory.release(part)
    result["held"] = sum(p.untyped_storage().nbytes() for p in model.weights())
    for part in ("weights", "training"):
        policy.memory.restore(part)
    result["restored_logp_r"] = policy.score(rows)
    now = [p for p in model.weights() if not p.requires_grad]
    result["base_kept"] = all(torch.equal(a, b) for a, b in zip(frozen, now, strict=True))
    if job.load is None:
        save_policy(folder / f"{job.file}-checkpoint", 1, policy, {}, keep=1)
        policy.update(rows, at_step_start=case.at_step_start)
        result["updated_twice"] = _copy(policy.adapter_weights())
    return result


def _copy(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named}
