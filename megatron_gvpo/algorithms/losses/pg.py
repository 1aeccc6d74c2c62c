"""Plain policy gradient: REINFORCE with the advantages of any estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from megatron_gvpo.algorithms.base import STEP_START, Loss, Metrics, References
from megatron_gvpo.algorithms.importance.base import effective_share
from megatron_gvpo.algorithms.losses.aggregation import Aggregation
from megatron_gvpo.algorithms.losses.correction import AnyImportance
from megatron_gvpo.types import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


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
