"""Advantages from rewards: a baseline, a scale, and a correction for groups without signal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from megatron_gvpo.algorithms.base import Advantage, Metrics, only_with
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class Estimator(Advantage):
    """A_i = alpha * (r_i - baseline_i) / (scale_i + eps), fp32 [n].

    baseline    mean  group mean, GRPO (arXiv 2402.03300) and GPG eq. 6
                loo   mean of the others, RLOO (arXiv 2402.14740): k/(k-1) times `mean`
                prior the expected reward of the prompt (`algorithm.prior`): ReMax, SPO
                none  the reward itself
    scale       group_std  std of the group's rewards, GRPO
                batch_std  std of all rewards, one of GPG's choices of F_norm
                none       1, GPG and Dr. GRPO (arXiv 2503.20783)
    ddof        of the std: 1 as in the public code of GRPO, 0 for the population std
    age         GPG's accurate gradient estimation (eq. 7-8): alpha = all / valid, counted in
                sample  sequences, B / (B - M), as in the paper: exact for means over sequences
                token   response tokens: exact for `token_mean`
                none    alpha = 1
    whiten      (A - mean) / (std + eps) over the optimizer step, every response counting once (sequence) or
                as often as it has tokens (token): REINFORCE++ (arXiv 2501.03262), SPO (arXiv 2509.13232)
    negative    the factor of negative advantages, applied last: Weighted GRPO (arXiv 2602.03452)

    Responses that are not trained (`mask_truncated`) count only in their group's mean and std: batch_std, age
    and whiten are over the responses that the update trains.

    A group is valid when its rewards differ. Every other group, also a group of one, has advantages of
    exactly 0 under the baselines mean and loo (before `whiten`); where no group is valid, alpha is 1.
    """

    name: Literal["group"] = "group"
    baseline: Literal["none", "mean", "loo", "prior"] = "mean"
    scale: Literal["none", "group_std", "batch_std"] = "none"
    ddof: int = Field(1, ge=0, le=1)
    eps: float = Field(1e-6, ge=0)
    age: Literal["none", "sample", "token"] = "none"
    whiten: Literal["none", "sequence", "token"] = "none"
    negative: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.needs_group and (self.scale == "group_std" or self.age != "none"):
            raise ValueError(
                f"baseline={self.baseline} with scale={self.scale}, age={self.age}: group_std and age "
                "compare the responses of a prompt, so they need baseline=mean or loo"
            )
        return self

    @property
    def ineffective_options(self) -> dict[str, str]:
        divides = self.scale != "none" or self.whiten != "none", "a scale or whiten"
        # whiten divides by the std of all advantages, and a factor that they share with them
        shared = self.whiten == "none", "whiten=none"
        over_batch = shared if self.scale == "batch_std" else (True, "")
        return only_with(ddof=divides, eps=divides, age=shared, scale=over_batch)

    @property
    def needs_group(self) -> bool:
        return self.baseline in ("mean", "loo")

    @property
    def needs_prior(self) -> bool:
        return self.baseline == "prior"

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
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
        advantage_n = alpha * advantage_n
        if self.whiten != "none":
            advantage_n = whitened(rows, advantage_n, self.whiten, self.ddof, self.eps)
        advantage_n = advantage_n.where(advantage_n >= 0, self.negative * advantage_n)
        return advantage_n.float(), metrics

    def _baseline(self, rows: TrainBatch, reward_n: Tensor) -> Tensor:
        if self.baseline == "none":
            return torch.zeros_like(reward_n)
        if self.baseline == "prior":
            return prior(rows)
        mean_n = rows.group_mean(reward_n)
        if self.baseline == "mean":
            return mean_n
        index_n, size_g = rows.groups
        k_n = size_g[index_n]
        return (k_n * mean_n - reward_n) / (k_n - 1).clamp(min=1)

    def _scale(self, rows: TrainBatch, reward_n: Tensor) -> Tensor:
        match self.scale:
            case "none":
                return torch.ones_like(reward_n)
            case "group_std":
                return group_std(rows, reward_n, self.ddof) + self.eps
            case "batch_std":
                _, std = _mean_and_std(reward_n, _trained(rows), self.ddof)
                return std + self.eps

    def _alpha(self, rows: TrainBatch, valid_n: Tensor) -> Tensor:
        size_n = _trained(rows) * (rows.length_n if self.age == "token" else 1)
        valid = size_n[valid_n].sum()
        if self.age == "none" or valid == 0:
            return torch.ones_like(valid)
        return size_n.sum() / valid


def component(rows: TrainBatch, name: str, key: str) -> Tensor:
    """A component of rewards, fp64 [n]. Raises ValueError, with the estimator's `key`, for a missing one."""
    if name not in rows.component_n:
        known = ", ".join(rows.component_n) or "none"
        raise ValueError(f"estimator.{key}: no reward component {name!r}; there are: {known}")
    return rows.component_n[name].double()


def rewards_differ(rows: TrainBatch, value_n: Tensor | None = None) -> Tensor:
    """True where the rewards (or another value) of a row's group differ, compared exactly; bool [n]."""
    value_n = rows.reward_n if value_n is None else value_n
    index_n, size_g = rows.groups
    highest_g = value_n.new_full((len(size_g),), -torch.inf)
    lowest_g = -highest_g
    highest_g = highest_g.index_reduce(0, index_n, value_n, "amax")
    lowest_g = lowest_g.index_reduce(0, index_n, value_n, "amin")
    return (highest_g > lowest_g)[index_n]


def group_std(rows: TrainBatch, value_n: Tensor, ddof: int = 1) -> Tensor:
    """Standard deviation of a value over its group, broadcast to [n]; 0 for a group of one."""
    index_n, size_g = rows.groups
    k_n = size_g[index_n]
    variance_n = rows.group_mean((value_n - rows.group_mean(value_n)) ** 2)
    return (variance_n * k_n / (k_n - ddof).clamp(min=1)).sqrt()


def normalised(rows: TrainBatch, value_n: Tensor, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """(value - group mean) / (group std + eps), fp64 [n]: GRPO's advantage; 0 in a group of equal values."""
    value_n = value_n.double()
    scaled_n = (value_n - rows.group_mean(value_n)) / (group_std(rows, value_n, ddof) + eps)
    return scaled_n.where(rewards_differ(rows, value_n), 0)


def whitened(
    rows: TrainBatch, value_n: Tensor, over: Literal["sequence", "token"], ddof: int, eps: float
) -> Tensor:
    """(value - mean) / (std + eps) over the trained rows, each counted once or once a token, [n]."""
    count_n = _trained(rows) * (rows.length_n if over == "token" else 1)
    mean, std = _mean_and_std(value_n, count_n, ddof)
    # The mean of centred advantages is 0 up to rounding: a group without signal keeps its zeros.
    mean = mean.where(mean.abs() > 1e-12 * std, 0)
    return (value_n - mean) / (std + eps)


def _trained(rows: TrainBatch) -> Tensor:
    """1 for a row that is trained, else 0, fp64 [n]."""
    trained_n = torch.ones_like(rows.reward_n) if rows.trained_n is None else rows.trained_n
    return trained_n.double()


def _mean_and_std(value_n: Tensor, count_n: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation of values, scalars; 0 if all weights are 0."""
    total = count_n.sum()
    mean = (count_n * value_n).sum() / total.clamp(min=1)
    variance = (count_n * (value_n - mean) ** 2).sum() / (total - ddof).clamp(min=1)
    return mean, variance.sqrt()


def prior(rows: TrainBatch) -> Tensor:
    """The expected reward of each row's prompt, fp64 [n]. Raises ValueError if one is missing."""
    if rows.prior_n is None or bool(rows.prior_n.isnan().any()):
        raise ValueError("some prompt has no expected reward: set algorithm.prior")
    return rows.prior_n.double()
