"""The corrections for the policy that sampled: ratios that are bounded above, or dropped out of bounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from megatron_gvpo.algorithms.importance.base import Importance, Level, Weighed
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


# Importance weights that drop tokens or responses whose ratio is out of bounds.


BOUNDS: dict[Level, tuple[float, float]] = {
    "token": (0.5, 5.0),
    "sequence": (0.0, 2.0),
    "geometric": (0.999, 1.001),
}


class Mask(Importance):
    """w_it = ratio where low <= ratio <= high, else 0.

        level token      drops tokens: IcePop (Every Step Evolves, arXiv 2510.18855), by default in [0.5, 5]
                         as INTELLECT-3 (arXiv 2512.16144)
        level sequence   drops responses: masked importance sampling (MIS) of Liu et al., When Speed Kills
                         Stability, 2025 (richardli.xyz/rl-collapse), by default in [0, 2] as verl's
                         `seq_mis`
        level geometric  drops responses by their mean log-ratio a token, whatever their length (Geo-MIS,
                         ibid.), by default in [0.999, 1.001] as verl recommends for bf16

    `veto` drops, beside these, every response with a token whose own r_it lies below it; 1e-4 is usual there.
    """

    name: Literal["mask"] = "mask"
    low: float | None = Field(None, ge=0)  # null: the level's default
    high: float | None = Field(None, gt=0)  # null: the level's default
    veto: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"low={low:g} and high={high:g} at level={self.level}: nothing lies between")
        if not low <= 1 <= high:
            raise ValueError(
                f"low={low:g} and high={high:g} at level={self.level}: they drop what both policies sample "
                "equally often, whose ratio is 1"
            )
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = BOUNDS[self.level]
        return low if self.low is None else self.low, high if self.high is None else self.high

    def weigh(self, rows: TrainBatch, ratio_r: Tensor, token_log_r: Tensor) -> Weighed:
        low, high = self.bounds
        dropped_r = (ratio_r < low) | (ratio_r > high)
        if self.veto is not None:
            vetoed_r = token_log_r < math.log(self.veto)
            dropped_r |= (rows.sequence_sum(vetoed_r.to(ratio_r.dtype)) > 0)[rows.seq_r]
        weight_r = self.kept_weight(ratio_r).masked_fill(dropped_r, 0)
        return Weighed(weight_r, dropped_r & False, dropped_r)

    def kept_weight(self, ratio_r: Tensor) -> Tensor:
        """Return the weight of the tokens that are not dropped."""
        return ratio_r


class Reject(Mask):
    """w_it = 1 where low <= ratio <= high, else 0; bounds and `veto` as of `mask`.

    Rejection without importance weights, like verl's `rollout_rs`; at level geometric, like its preset
    `geo_rs` (Liu et al., ibid.).
    """

    name: Literal["reject"] = "reject"  # type: ignore[assignment]

    def kept_weight(self, ratio_r: Tensor) -> Tensor:
        return ratio_r.new_ones(ratio_r.shape)


# Importance weights that are bounded above.


class Truncate(Importance):
    """w_it = min(ratio, cap).

    Truncation bounds the variance, at the price of a bias where the ratio exceeds `cap` (Ionides, Truncated
    Importance Sampling, 2008). For the gap between engine and trainer:

        level token      TIS of Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL
                         Training, 2025 (fengyao.notion.site/off-policy-rl). The weight of the tokens before
                         is missing, so it is biased even without `cap`.
        level sequence   Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the
                         Training-Inference Mismatch, 2025 (richardli.xyz/rl-collapse). Without `cap` it is
                         unbiased, and its variance grows exponentially with the length.
        level geometric  the same with the mean of log r_it, as slime and miles have it: small variance,
                         biased.
    """

    name: Literal["truncate"] = "truncate"
    cap: float = Field(2.0, ge=1)

    def weigh(self, rows: TrainBatch, ratio_r: Tensor, token_log_r: Tensor) -> Weighed:
        truncated_r = ratio_r > self.cap
        return Weighed(ratio_r.clamp(max=self.cap), truncated_r, truncated_r & False)
