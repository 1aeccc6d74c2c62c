"""BNPO: advantages scaled by a Beta density (arXiv 2506.02864)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from megatron_gvpo.algorithms.base import Advantage, Component, Metrics
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 1e6  # weight, as in the paper's code


class BNPO(Advantage):
    """A_i = (r_i - p) / Beta(p; a, b), p the mean reward of the group, rewards in [0, 1]; fp32 [n].

    a and b come from the mean m and variance v (ddof 1) of p over the prompts of the optimizer step:

        c = m (1 - m) / v - 1,  a = max(1, 1 + c m / 3),  b = max(1, 1 + c (1 - m) / 3)

    a = b = 1 is REINFORCE with a baseline, a = b = 3/2 GRPO up to a constant. `components`: the mean of the
    advantages of every component of the reward, instead of the advantage of the whole reward.
    """

    name: Literal["bnpo"] = "bnpo"
    components: bool = False

    @property
    def by_components(self) -> bool:  # type: ignore[override]
        return self.components

    @property
    def components_read(self) -> tuple[Component, ...]:
        return (0,) if self.components else ()

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        values = list(rows.component_n.values()) if self.components else [rows.reward_n]
        parts = [self._advantage(rows, value_n.double()) for value_n in values]
        advantage_n = torch.stack([advantage_n for advantage_n, _, _ in parts]).mean(0)
        return advantage_n.float(), {"beta_a": parts[0][1], "beta_b": parts[0][2]}

    def _advantage(self, rows: TrainBatch, reward_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if reward_n.min() < 0 or reward_n.max() > 1:
            raise ValueError(
                f"BNPO needs rewards in [0, 1], and there are some from {float(reward_n.min()):g} to "
                f"{float(reward_n.max()):g}: map them with the shaper `affine`"
            )
        p_n = rows.group_mean(reward_n)
        index_n, size_g = rows.groups
        p_g = torch.zeros(len(size_g), dtype=p_n.dtype).index_copy(0, index_n, p_n)
        a, b = _shape(p_g)
        density_n = torch.exp(_log_beta(p_n, a, b))
        weight_n = (1 / density_n).clamp(max=LARGEST)
        # A group without differences has no signal, whatever its density.
        return ((reward_n - p_n) * weight_n).where(reward_n != p_n, 0), a, b


def _shape(p_g: Tensor) -> tuple[Tensor, Tensor]:
    """Beta's a and b, scalars."""
    mean, one = p_g.mean(), torch.ones((), dtype=p_g.dtype)
    variance = p_g.var() if len(p_g) > 1 else torch.zeros_like(mean)
    if variance == 0:
        return one, one  # the spread is unknown: plain REINFORCE with a baseline
    c = mean * (1 - mean) / variance - 1
    return torch.maximum(one, 1 + c * mean / 3), torch.maximum(one, 1 + c * (1 - mean) / 3)


def _log_beta(p_n: Tensor, a: Tensor, b: Tensor) -> Tensor:
    inside_n = p_n.clamp(1e-12, 1 - 1e-12)
    norm = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    return norm + (a - 1) * inside_n.log() + (b - 1) * (1 - inside_n).log()
