"""Policy gradients whose token weights have no gradient: REINFORCE and CISPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms import importance
from megatron_gvpo.algorithms.base import STEP_START, Loss, Metrics, References
from megatron_gvpo.algorithms.importance.base import Importance, effective_share
from megatron_gvpo.algorithms.losses import bounded
from megatron_gvpo.algorithms.losses.aggregation import Aggregation
from megatron_gvpo.algorithms.registry import choice
from megatron_gvpo.types import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


# The correction that a policy gradient may have for the policy that sampled: its option `importance`.
if TYPE_CHECKING:
    AnyImportance = Importance
else:
    AnyImportance = choice(importance, kind=Importance, default="truncate")


# Plain policy gradient: REINFORCE with the advantages of any estimator.


class PolicyGradient(Loss):
    """L = -sum_it c_it w_it A_i log pi(y_it), with c from `aggregation`. No clip, reference or KL.

    GPG (arXiv 2504.02546) eq. 5, where this sum, to be minimised, is called J; its `aggregation` is the
    default here. w is 1, or from `importance`, which costs a scoring pass of the later mini-batches under
    the policy at step start.
    """

    name: Literal["pg"] = "pg"
    aggregation: Aggregation = Aggregation(name="token_mean")
    importance: AnyImportance | None = None  # corrects for the policy that sampled

    signal: ClassVar[Literal["advantage"]] = "advantage"

    @property
    def reference_policies(self) -> References:
        return {"old": STEP_START} if self.importance else {}

    @property
    def linear(self) -> bool:
        return self.importance is None

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return effective_share(metrics)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows = inputs.rows
        weight_r = self.aggregation(rows, inputs.totals) * rows.token_advantages()
        metrics: Metrics = {}
        if self.importance:
            importance_r, metrics = self.importance(rows, inputs.totals)
            weight_r = weight_r * importance_r
        return -(weight_r * inputs.logp_r).sum(), metrics


# CISPO: clipped importance weights, which keep every token's gradient (MiniMax-M1, arXiv 2506.13585).


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
    def only_after_updates(self) -> tuple[str, ...]:
        return ("clip_high",)

    @property
    def known_at_step_start(self) -> bool:
        return self.importance is None  # an importance block also reads log-probs by themselves

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return effective_share(metrics)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows, totals = inputs.rows, inputs.totals
        assert rows.old_logp_r is not None, "CISPO needs the log-probs at step start (reference_policies)"
        log_ratio_r = (inputs.logp_r - rows.old_logp_r).detach()
        ratio_r = bounded.ratio(log_ratio_r)
        weight_r = ratio_r.clamp(max=1 + self.clip_high) * rows.token_advantages()
        metrics = {
            "clip_fraction": (ratio_r > 1 + self.clip_high).sum() / totals.tokens,
            "kl": bounded.k3(log_ratio_r).sum() / totals.tokens,
        }
        if self.importance:
            importance_r, shares = self.importance(rows, totals)
            weight_r = weight_r * importance_r
            metrics |= shares
        return -(self.aggregation(rows, totals) * weight_r * inputs.logp_r).sum(), metrics
