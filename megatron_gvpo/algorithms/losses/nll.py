"""Negative log-likelihood: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from megatron_gvpo.algorithms.base import Loss, Metrics
from megatron_gvpo.algorithms.losses.aggregation import Aggregation
from megatron_gvpo.types import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class NLL(Loss):
    """L = -sum_it c_it log pi(y_it), with c from `aggregation`; every response has weight 1."""

    name: Literal["nll"] = "nll"
    aggregation: Aggregation = Aggregation(name="token_mean")

    signal: ClassVar[Literal["none"]] = "none"

    @property
    def linear(self) -> bool:
        return True

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        coef_r = self.aggregation(inputs.rows, inputs.totals)
        return -(coef_r * inputs.logp_r).sum(), {}
