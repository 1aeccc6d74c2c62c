"""Measures what is left of adapters when they are merged into weights of fewer digits.

The base's weights lie on bf16's grid. A merged weight is rounded to it, too, so that a change smaller than
half a step vanishes, while the trainer computes with it.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

LEAST = 0.9  # share of the change below which a warning is due

log = logging.getLogger(__name__)


class MergeRounding:
    """Sums over the merged weights of an export: the adapters' change, and the part of it that arrives."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)  # |D|^2, <D, D'>, |D' - D|^2 for D' after rounding

    def add(self, base: Tensor, merged: Tensor, change: Tensor) -> None:
        """`base` and `merged` [out, in] in the model's dtype; `change` [out, in], fp32, before rounding."""
        arrived = merged.float() - base.float()
        sums = change.pow(2).sum(), (arrived * change).sum(), (arrived - change).pow(2).sum()
        self._sums = self._sums.to(base.device) + torch.stack(sums).double()

    @property
    def share(self) -> float:
        """How much of the change arrives, as its projection on the change; 1 without a change."""
        change, arrived, _ = self._sums.tolist()
        return arrived / change if change else 1.0

    @property
    def error(self) -> float:
        """The relative error of what arrives; 0 without a change."""
        change, _, lost = self._sums.tolist()
        return float((lost / change) ** 0.5) if change else 0.0

    def warn(self) -> bool:
        """Log a warning if little of the change arrives; returns True if it did."""
        if self.share >= LEAST:
            return False
        log.warning(
            "model.dtype=bfloat16: merged weights have %.0f %% of the adapters' change (relative error %.2f) "
            "because rounding takes the rest, so rollouts come from another policy than the one that trains. "
            "It grows with the change: use a larger optimizer.lr, or rollout.weights.transport=adapter",
            100 * self.share,
            self.error,
        )
        return True
