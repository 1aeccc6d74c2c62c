"""Losses that read no reward: the likelihood of demonstrations, and the divergence from another model."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from megatron_gvpo.algorithms.base import FullDivergence, Loss, Metrics
from megatron_gvpo.algorithms.losses.aggregation import Aggregation
from megatron_gvpo.types import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


# Negative log-likelihood: supervised fine-tuning on demonstrations.


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


# Distillation: the divergence from another model over the whole vocabulary, and nothing else.


class Distill(Loss):
    """L = coef mean_it D(t(. | y_<t), pi(. | y_<t)), with D and t of `divergence`: GKD, arXiv 2306.13649.

    On the policy's own samples this is on-policy distillation. As in GKD, there is no gradient through the
    sampling. The head computes the complete loss.
    """

    name: Literal["distill"] = "distill"
    divergence: FullDivergence = FullDivergence()

    signal: ClassVar[Literal["none"]] = "none"
    has_terms: ClassVar[bool] = False

    @property
    def linear(self) -> bool:
        return True

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        return 0 * inputs.logp_r.sum(), {}
