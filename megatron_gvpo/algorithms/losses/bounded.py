"""Bounded exponentials of log-ratios, so that one token far from a policy does not dominate an update.

Within the bounds they are the formulas of the papers. A ratio above e^88 would be infinite in fp32, and
infinity times an advantage of 0 is NaN. At 20 nats, k3 alone has a gradient of 5e8 at one token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_gvpo.core.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor

MOST_RATIO = 20.0  # nats; above it a ratio is e^20 and has no gradient, as in verl
MOST_K3 = 10.0  # nats; above it k3 goes on as a straight line


def ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) of any shape, at most e^20; a policy's ratio to another."""
    return log_ratio.clamp(max=MOST_RATIO).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """x - 1 - log x with x = exp(log_ratio), of any shape: Schulman's estimate of a KL, never negative.

    `log_ratio`: log-prob by the policy to compare with, minus that by the policy that sampled. Above 10 nats
    it goes on with the slope that it has there, e^10 - 1, so that the gradient points the same way and is at
    most that.
    """
    bounded = log_ratio.clamp(max=MOST_K3)
    slope = math.expm1(MOST_K3)
    line = slope * (log_ratio - MOST_K3) + slope - MOST_K3
    # torch.where, not a sum: gradients of e^10 that cancel would leave rounding errors in every token.
    return torch.where(log_ratio > MOST_K3, line, bounded.exp() - 1 - bounded)
