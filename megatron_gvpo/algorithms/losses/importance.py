"""Importance weights that correct for the difference between the rollout engine and the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from megatron_gvpo.algorithms.base import Block, Metrics
from megatron_gvpo.types import BatchTotals, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class TruncatedImportance(Block):
    """w_it = min(pi_old(y_it) / pi_engine(y_it), cap), fp32 [r], without gradient.

    pi_old is the policy at step start by the trainer, pi_engine by the engine that sampled the token: the
    same weights, other kernels and precision. The token's term in a policy gradient is multiplied by w_it.
    Truncation bounds the variance, at the price of a bias where the ratio exceeds `cap` (Ionides, Truncated
    Importance Sampling, 2008); for the gap between engine and trainer, TIS of Yao et al., Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training, 2025 (fengyao.notion.site/off-policy-rl).

    With rollout.top_p < 1 an engine that renormalises (vLLM) makes every ratio smaller by the kept mass.
    """

    needs_engine_logprobs: ClassVar[bool] = True

    cap: float = Field(2.0, ge=1)

    def __call__(self, rows: TrainBatch, totals: BatchTotals) -> tuple[Tensor, Metrics]:
        """Weights, and shares of metrics: their mean, and the share of tokens above the cap."""
        assert rows.old_logp_r is not None, "importance needs old log-probs (reference_policies)"
        if rows.engine_logp_r is None:
            raise ValueError("algorithm.loss.importance: the rollout engine gave no log-probs of its tokens")
        ratio_r = (rows.old_logp_r - rows.engine_logp_r).detach().exp()
        ratio_r = ratio_r.where(~rows.engine_logp_r.isnan(), 1)  # demonstrations: no engine sampled them
        weight_r = ratio_r.clamp(max=self.cap)
        return weight_r, {
            "importance": weight_r.sum() / totals.tokens,
            "importance_truncated": (ratio_r > self.cap).sum() / totals.tokens,
        }
