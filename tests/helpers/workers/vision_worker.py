"""Rank function of test_vision_models.py: scores, gradients, an update and exports of one case a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.cases.vision_cases import VisionCase, with_placeholders
from helpers.distributed import forget_layout, run_number
from helpers.workers.gradient_worker import UPDATE, _copy, sizes_of
from megatron_gvpo.settings.config import Config, build_config


@dataclass(frozen=True)
class VisionResult:
    logp_r: Tensor
    marked_logp_r: Tensor  # log-probs of responses with placeholders of images
    loss: float
    gradients: dict[str, Tensor]  # under the names of files
    grad_norm: float
    exported: dict[str, Tensor]
    updated: dict[str, Tensor]
    updated_logp_r: Tensor
    next_logp_r: Tensor  # after a second update
    settled_logp_r: Tensor  # after a later export, which waits for all weights of the update
    with_gradient: int  # the number of elements in rank 0's gradient buffers
    optimizer_parameters: int  # elements that rank 0's optimizer has


def config_of(case: VisionCase, directory: Path) -> Config:
    return build_config(
        {
            "output_dir": "unused",
            "model": {
                "path": str(directory / case.model),
                "dtype": case.dtype,
                "train_vision": case.trained,
            },
            "data": {"train": {"path": "unused", "demonstration_key": "unused"}},
            "algorithm": {"recipe": "sft"},
            "train": {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": case.budget},
            "optimizer": UPDATE,
            "parallel": case.layout.settings,
        }
    )


def run(directory: str) -> None:
    from megatron_gvpo.checks.layout import check_layout
    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    cases, rows = torch.load(folder / "work.pt", weights_only=False)
    case = cases[run_number()]
    config = config_of(case, folder)
    check_layout(config, dist.get_world_size())
    with sizes_of(case.layout):
        results = _measured(Policy.of(config), rows)
    if dist.get_rank() == 0:
        torch.save(results, folder / f"found-{case}.pt")
    forget_layout()


def _measured(policy: Any, rows: Any) -> VisionResult:
    from megatron_gvpo.megatron.gradient_export import export_gradients

    logp_r = policy.score(rows)
    marked_logp_r = policy.score(with_placeholders(rows))
    exported = _copy(policy.weights())
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    apply = policy.optimizer.apply

    def look_first() -> Any:
        gradients.update(export_gradients(policy.model))
        update = apply()
        norms.append(update.grad_norm)
        return update

    policy.optimizer.apply = look_first
    result = policy.update(rows, at_step_start=True)
    policy.optimizer.apply = apply
    updated, updated_logp_r = _copy(policy.weights()), policy.score(rows)
    policy.update(rows, at_step_start=True)
    next_logp_r = policy.score(rows)
    for _ in policy.weights():
        pass
    return VisionResult(
        logp_r=logp_r,
        marked_logp_r=marked_logp_r,
        loss=result.metrics["loss"],
        gradients=gradients,
        grad_norm=norms[0],
        exported=exported,
        updated=updated,
        updated_logp_r=updated_logp_r,
        next_logp_r=next_logp_r,
        settled_logp_r=policy.score(rows),
        with_gradient=sum(buffer.numel() for buffer in policy.model.gradient_buffers()),
        optimizer_parameters=sum(
            p.numel() for group in policy.optimizer.megatron.param_groups for p in group["params"]
        ),
    )
