"""CISPO: clipped importance weights, which keep every token's gradient (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.base import STEP_START, Loss, Metrics, References
from megatron_gvpo.algorithms.losses.aggregation import Aggregation
from megatron_gvpo.types import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class CISPO(Loss):
    """L = -sum_it c_it stopgrad(min(rho_it, 1 + clip_high)) A log pi(y_it), rho = pi / pi_old per token.

    The ratio is a weight without gradient of its own, bounded above only, so that no token loses its
    gradient to clipping. No KL.
    """

    name: Literal["cispo"] = "cispo"
    clip_high: float = Field(4.0, gt=0)
    aggregation: Aggregation = Aggregation(name="token_mean")  # how token terms add up to the loss

    signal: ClassVar[Literal["advantage"]] = "advantage"

    @property
    def reference_policies(self) -> References:
        return {"old": STEP_START}

    @property
    def known_at_step_start(self) -> bool:
        return True

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows, totals = inputs.rows, inputs.totals
        assert rows.old_logp_r is not None, "CISPO needs the log-probs at step start (reference_policies)"
        log_ratio_r = (inputs.logp_r - rows.old_logp_r).detach()
        ratio_r = log_ratio_r.exp()
        weight_r = ratio_r.clamp(max=1 + self.clip_high) * rows.token_advantages()
        metrics = {
            "clip_fraction": (ratio_r > 1 + self.clip_high).sum() / totals.tokens,
            "kl": (ratio_r - 1 - log_ratio_r).sum() / totals.tokens,
        }
        return -(self.aggregation(rows, totals) * weight_r * inputs.logp_r).sum(), metrics
