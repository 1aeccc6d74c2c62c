"""Advantages whose baseline is the group's median, or its mean shrunk towards a prior."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.advantages.estimator import prior
from megatron_gvpo.algorithms.base import Advantage, Metrics
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


# MC-GRPO: the median as the baseline (arXiv 2601.22582).


class MedianEstimator(Advantage):
    """A_i = (r_i - median) / (MAD + floor), MAD = median |r - median| of the group; fp32 [n].

    In a group of even size the median is the lower of the two middle values, as in torch. `age`: multiply by
    k / (number of non-zero advantages in the group). The authors' trainer for GSM8K does so, and the one for
    MATH does not; the abstract does not mention it. `drop_pivot`: the response that is the median has
    advantage 0 and is not trained, so sample k + 1 for k gradients.

    With binary rewards MAD is often 0: then advantages are 1 / floor, and gradient clipping has to help; the
    code's floor is 1e-3.
    """

    name: Literal["median"] = "median"
    floor: float = Field(1e-3, gt=0)
    age: bool = True
    drop_pivot: bool = True

    @property
    def masks_responses(self) -> bool:  # type: ignore[override]
        return self.drop_pivot

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        reward_n = rows.reward_n.double()
        centred_n = reward_n - group_median(rows, reward_n)
        advantage_n = centred_n / (group_median(rows, centred_n.abs()) + self.floor)
        if self.age:
            share_n = rows.group_mean((advantage_n != 0).double())
            advantage_n = advantage_n / share_n.where(share_n > 0, 1)
        return advantage_n.float(), {"zero_fraction": (advantage_n == 0).double().mean()}

    def fill(self, rows: TrainBatch) -> tuple[TrainBatch, Metrics]:
        rows, metrics = super().fill(rows)
        if not self.drop_pivot:
            return rows, metrics
        centred_n = rows.reward_n - group_median(rows, rows.reward_n)
        trained_n = (
            torch.ones(len(rows), dtype=torch.bool) if rows.trained_n is None else rows.trained_n.clone()
        )
        for members in members_of_groups(rows):
            if len(members) > 1:
                trained_n[next(i for i in members if centred_n[i] == 0)] = False
        return rows.with_columns(trained_n=trained_n), metrics


def group_median(rows: TrainBatch, value_n: Tensor) -> Tensor:
    """Lower median of a value over its group, broadcast to [n]."""
    median_n = torch.empty_like(value_n)
    for members in members_of_groups(rows):
        median_n[members] = value_n[members].median()
    return median_n


def members_of_groups(rows: TrainBatch) -> list[list[int]]:
    """The row indices of every group."""
    index_n, size_g = rows.groups
    members: list[list[int]] = [[] for _ in size_g]
    for i, g in enumerate(index_n.tolist()):
        members[g].append(i)
    return members


# V_0.5: shrink the group mean towards a prior (arXiv 2603.10848).


class ShrunkEstimator(Advantage):
    """A_i = r_i - [w mean + (1 - w) V], w = D / (D + 1/k), D = max(0, (mean - V)^2 - 1/k); fp32 [n].

    V is the expected reward of the prompt (`algorithm.prior`), rewards are -1 or 1, so that 1/k bounds the
    variance of the mean. If prior and mean differ by less than this bound allows, the prior is the baseline.
    Use k >= 3: the paper reports divergence at k <= 2.
    """

    needs_prior: ClassVar[bool] = True

    name: Literal["shrunk"] = "shrunk"

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        reward_n, prior_n = rows.reward_n.double(), prior(rows)
        index_n, size_g = rows.groups
        noise_n = 1 / size_g[index_n].double()
        mean_n = rows.group_mean(reward_n)
        apart_n = ((mean_n - prior_n) ** 2 - noise_n).clamp(min=0)
        trust_n = apart_n / (apart_n + noise_n)
        baseline_n = trust_n * mean_n + (1 - trust_n) * prior_n
        return (reward_n - baseline_n).float(), {"trust_in_group": trust_n.mean()}
