"""Plain policy gradient (REINFORCE with whatever advantages the estimator gives)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from megatron_gvpo.algorithms.aggregation import Aggregation
from megatron_gvpo.algorithms.base import Loss, Metrics
from megatron_gvpo.types import LossInputs


class PolicyGradient(Loss):
    """L = -sum_it c_it A_i log pi(y_it), with c from `aggregation`. No ratio, clip, reference or KL.

    GPG (arXiv 2504.02546) eq. 5, which prints this as J; its `aggregation` is the default here.
    """

    name: Literal["pg"] = "pg"
    aggregation: Aggregation = Aggregation(name="token_mean")

    signal: ClassVar[Literal["advantage"]] = "advantage"

    @property
    def linear(self) -> bool:
        return True

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows = inputs.rows
        assert rows.advantage_n is not None, "a policy gradient needs advantages (Loss.signal)"
        coef_r = self.aggregation(rows, inputs.totals)
        return -(coef_r * rows.advantage_n[rows.seq_r] * inputs.logp_r).sum(), {}
