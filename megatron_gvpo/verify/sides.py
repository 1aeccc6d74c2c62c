"""The two sides of a comparison, each in a process of its own, and the difference of what they wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_gvpo.types import TrainBatch
from megatron_gvpo.verify import reference
from megatron_gvpo.verify.layout import Layout
from megatron_gvpo.verify.measures import (
    TEMPERATURE,
    UPDATE,
    Computed,
    Difference,
    Limits,
    compare,
    make_rows,
)
from megatron_gvpo.verify.shrink import VOCABULARY
from megatron_gvpo.verify.tiny_model import save_tiny


@dataclass(frozen=True)
class Result:
    """One layout's difference from transformers; or why there is none."""

    layout: Layout
    limits: Limits
    difference: Difference | None
    failure: str | None = None  # an error while the model was built or ran
    refused: bool = False  # the failure is a ConfigError: a layout that the model cannot have

    @property
    def problem(self) -> str | None:
        return self.failure if self.difference is None else self.difference.problem(self.limits)


def reference_side(config: dict[str, Any], directory: Path, where: str) -> None:
    """Write the tiny checkpoint, and what transformers computes of it."""
    save_tiny(config, directory / "model", where)
    model, rows = reference.load(directory / "model"), make_rows(VOCABULARY)
    wanted = _by_transformers(model, directory / "model", rows)
    with reference.in_float32(model):
        rounding = compare(_by_transformers(model, directory / "model", rows), wanted)
    torch.save((wanted, rounding), directory / "wanted.pt")


def _by_transformers(model: Any, directory: Path, rows: TrainBatch) -> Computed:
    logp_r = torch.cat(reference.log_probs(model, rows, TEMPERATURE))
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(-logp_r.mean(), list(parameters.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    updated = reference.clipped_adamw(parameters, gradients, norm, UPDATE)
    return Computed(
        logp_r=logp_r.detach(),
        gradients=reference.as_in_file(model, gradients),
        norm=norm,
        updated=reference.as_in_file(model, updated),
        exported=load_file(directory / "model.safetensors"),
    )


def candidate_side(layout: Layout, directory: Path) -> None:
    """Write what this package's build computes of the checkpoint under `layout`. A collective."""
    from megatron_gvpo.verify import candidate  # imports Megatron

    computed = candidate.compute(directory / "model", layout, make_rows(VOCABULARY))
    if dist.get_rank() == 0:
        torch.save(computed, directory / f"{layout}.pt")


def read_result(layout: Layout, directory: Path) -> Result:
    """Compare what both sides have written."""
    wanted, rounding = torch.load(directory / "wanted.pt", weights_only=False)
    found = torch.load(directory / f"{layout}.pt", weights_only=False)
    return Result(layout, Limits.for_rounding(rounding), compare(found, wanted))
