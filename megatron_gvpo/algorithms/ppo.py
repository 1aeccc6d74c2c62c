"""Clipped importance ratios (PPO without a critic), as GRPO, Dr. GRPO and DAPO use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from megatron_gvpo.algorithms.aggregation import Aggregation
from megatron_gvpo.algorithms.base import STEP_START, Loss, Metrics, Reference
from megatron_gvpo.algorithms.importance import TruncatedImportance
from megatron_gvpo.types import LossInputs


class PPO(Loss):
    """L = sum_it c_it [ -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3 ].

    rho = pi / pi_old per token with pi_old the policy at step start, A = A_i the advantage of the
    response, c from `aggregation`, w the token's weight by `importance` (1 without), k3 = x_ref/x - 1 -
    log(x_ref/x) >= 0 the estimate of KL(pi || pi_ref) with x = pi(y_it) (arXiv 2402.03300 eq. 3-4). Without
    kl_coef no reference policy is kept.
    """

    name: Literal["ppo"] = "ppo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    kl_coef: float = Field(0.0, ge=0)
    reference: Reference = Reference(name="fixed")
    aggregation: Aggregation = Aggregation(name="sequence_mean")
    importance: TruncatedImportance | None = None

    signal: ClassVar[Literal["advantage"]] = "advantage"

    @property
    def anchors(self) -> Mapping[Literal["old", "ref"], Reference]:
        return {"old": STEP_START, "ref": self.reference} if self.kl_coef else {"old": STEP_START}

    @property
    def known_at_step_start(self) -> bool:
        # `importance` sees the old log-probs by themselves, and not only as differences from the present.
        return self.importance is None and all(anchor == STEP_START for anchor in self.anchors.values())

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows, totals, logp_r = inputs.rows, inputs.totals, inputs.logp_r
        assert rows.advantage_n is not None, "PPO needs advantages (Loss.signal)"
        assert rows.old_logp_r is not None, "PPO needs the log-probs at step start (Loss.anchors)"
        coef_r = self.aggregation(rows, totals)
        advantage_r = rows.advantage_n[rows.seq_r]
        log_ratio_r = logp_r - rows.old_logp_r
        ratio_r = log_ratio_r.exp()
        unclipped_r = ratio_r * advantage_r
        clipped_r = ratio_r.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage_r
        loss_r = -unclipped_r.minimum(clipped_r)
        metrics = {
            "clip_fraction": (clipped_r < unclipped_r).sum() / totals.tokens,
            "kl": (ratio_r - 1 - log_ratio_r).detach().sum() / totals.tokens,
        }
        if self.importance:
            importance_r, shares = self.importance(rows, totals)
            loss_r = importance_r * loss_r
            metrics |= shares
        if self.kl_coef:
            assert rows.ref_logp_r is not None, "kl_coef needs the reference's log-probs (Loss.anchors)"
            ref_ratio_r = rows.ref_logp_r - logp_r
            k3_r = ref_ratio_r.exp() - 1 - ref_ratio_r
            loss_r = loss_r + self.kl_coef * k3_r
            metrics["kl_ref"] = k3_r.detach().sum() / totals.tokens
        return (coef_r * loss_r).sum(), metrics
