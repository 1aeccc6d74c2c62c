"""Rewards to advantages: baseline x scale x correction of the gradient for groups without signal."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from megatron_gvpo.algorithms.base import Block, Metrics
from megatron_gvpo.types import Rows


class Estimator(Block):
    """A_i = alpha * (r_i - baseline_i) / (scale_i + eps), fp32 [n].

    baseline    mean  group mean, GRPO (arXiv 2402.03300) and GPG eq. 6
                loo   mean of the others, RLOO (arXiv 2402.14740): k/(k-1) times `mean`
                none  the reward itself
    scale       group_std  std of the group's rewards, GRPO
                batch_std  std of all rewards, one of GPG's choices of F_norm
                none       1, GPG and Dr. GRPO (arXiv 2503.20783)
    ddof        of the std: 1 as in the public code of GRPO, 0 for the population std
    age         GPG's accurate gradient estimation (eq. 7-8): alpha = all / valid, counted in
                sample  sequences, B / (B - M), as in the paper: exact for means over sequences
                token   response tokens: exact for `token_mean`
                none    alpha = 1

    A group is valid when its rewards differ. Any other, a group of one included, has advantages of
    exactly 0 under every baseline; where no group is valid, alpha is 1.
    """

    baseline: Literal["none", "mean", "loo"] = "mean"
    scale: Literal["none", "group_std", "batch_std"] = "none"
    ddof: Literal[0, 1] = 1
    eps: float = Field(1e-6, ge=0)
    age: Literal["none", "sample", "token"] = "none"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.baseline == "none" and (self.scale == "group_std" or self.age != "none"):
            raise ValueError(
                f"baseline=none with scale={self.scale}, age={self.age}: group_std and age compare the "
                "responses of a prompt, so they need baseline=mean or loo"
            )
        return self

    @property
    def needs_group(self) -> bool:
        """Whether it compares the responses of a prompt with each other."""
        return self.baseline != "none"

    def __call__(self, rows: Rows) -> tuple[Tensor, Metrics]:
        """Advantages of `rows`, fp32 [n], and metrics of the whole batch.

        `rows` are all rows of one optimizer step: batch_std and alpha are statistics over them.
        """
        reward_n = rows.reward_n.double()
        valid_n = rewards_differ(rows)
        advantage_n = (reward_n - self._baseline(rows, reward_n)) / self._scale(rows, reward_n)
        if self.needs_group:
            advantage_n = advantage_n.where(valid_n, 0)
        alpha = self._alpha(rows, valid_n)
        metrics = {"valid_fraction": valid_n.double().mean(), "age_alpha": alpha}
        return (alpha * advantage_n).float(), metrics

    def _baseline(self, rows: Rows, reward_n: Tensor) -> Tensor:
        if self.baseline == "none":
            return torch.zeros_like(reward_n)
        mean_n = rows.group_mean(reward_n)
        if self.baseline == "mean":
            return mean_n
        index_n, size_g = rows.groups
        k_n = size_g[index_n]
        return (k_n * mean_n - reward_n) / (k_n - 1).clamp(min=1)

    def _scale(self, rows: Rows, reward_n: Tensor) -> Tensor:
        match self.scale:
            case "none":
                return torch.ones_like(reward_n)
            case "group_std":
                index_n, size_g = rows.groups
                k_n = size_g[index_n]
                variance_n = rows.group_mean((reward_n - rows.group_mean(reward_n)) ** 2)
                return (variance_n * k_n / (k_n - self.ddof).clamp(min=1)).sqrt() + self.eps
            case "batch_std":
                sum_of_squares = ((reward_n - reward_n.mean()) ** 2).sum()
                return (sum_of_squares / max(len(rows) - self.ddof, 1)).sqrt() + self.eps

    def _alpha(self, rows: Rows, valid_n: Tensor) -> Tensor:
        size_n = (rows.length_n if self.age == "token" else torch.ones_like(rows.length_n)).double()
        valid = size_n[valid_n].sum()
        if self.age == "none" or valid == 0:
            return torch.ones_like(valid)
        return size_n.sum() / valid


def rewards_differ(rows: Rows) -> Tensor:
    """Whether the rewards of each row's group differ, bool [n]; compared exactly."""
    index_n, size_g = rows.groups
    highest_g = rows.reward_n.new_full((len(size_g),), -torch.inf)
    lowest_g = -highest_g
    highest_g = highest_g.index_reduce(0, index_n, rows.reward_n, "amax")
    lowest_g = lowest_g.index_reduce(0, index_n, rows.reward_n, "amin")
    return (highest_g > lowest_g)[index_n]
