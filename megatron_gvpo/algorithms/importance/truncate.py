"""Importance weights that are bounded above."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megatron_gvpo.algorithms.importance.base import Importance, Weighed
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


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
