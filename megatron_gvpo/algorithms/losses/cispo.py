"""CISPO: clipped importance weights, which keep every token's gradient (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.base import STEP_START, Loss, Metrics, References
from megatron_gvpo.algorithms.importance.base import effective_share
from megatron_gvpo.algorithms.losses.aggregation import Aggregation
from megatron_gvpo.algorithms.losses.correction import AnyImportance
from megatron_gvpo.types import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class CISPO(Loss):
    """L = -sum_it c_it w_it stopgrad(min(rho_it, 1 + clip_high)) A log pi(y_it), rho = pi / pi_old per token.

    The ratio is a weight without gradient of its own, bounded above only, so that no token loses its
    gradient to clipping. w is 1, or from `importance`. No KL.
    """

    name: Literal["cispo"] = "cispo"
    clip_high: float = Field(4.0, gt=0)
    aggregation: Aggregation = Aggregation(name="token_mean")  # how token terms add up to the loss
    importance: AnyImportance | None = None  # corrects for the policy that sampled

    signal: ClassVar[Literal["advantage"]] = "advantage"

    @property
    def reference_policies(self) -> References:
        return {"old": STEP_START}

    @property
    def known_at_step_start(self) -> bool:
        return self.importance is None  # an importance block also reads log-probs by themselves

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return effective_share(metrics)

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
        if self.importance:
            importance_r, shares = self.importance(rows, totals)
            weight_r = weight_r * importance_r
            metrics |= shares
        return -(self.aggregation(rows, totals) * weight_r * inputs.logp_r).sum(), metrics
