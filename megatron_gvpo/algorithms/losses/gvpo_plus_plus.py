"""GVPO++: GVPO as distillation from a teacher, with a weight for every response (arXiv 2609.21432)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from megatron_gvpo.algorithms.base import TEACHER, Loss, Metrics, Reference, References, check_call, only_with
from megatron_gvpo.algorithms.losses.aggregation import GroupNorm, group_coefficients
from megatron_gvpo.algorithms.losses.gvpo import Term, log_ratio
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.core.user_functions import call_function, refused
from megatron_gvpo.types import LossInputs, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class GVPOPlusPlus(Loss):
    """Make the weighted log-ratios between policy and teacher equal within a group.

    For k responses y_i of a prompt with l_i = log pi(y_i), t_i = log pi_teacher(y_i) (both summed over the
    response's tokens) and a weight f_i > 0 of the response, bars for group means:

        z_i     = f_i (l_i - t_i)
        L       = 1/2 sum_i (z_i - zbar)^2
        dL/dl_i = f_i (z_i - zbar)

    `norm` divides the group sum, then groups are averaged. The responses may come from any policy of full
    support. The teacher is the only optimum for any f: where all z are equal to c, pi = pi_teacher
    exp(c / f), and only c = 0 makes the probabilities sum to 1.

    f_i = |y_i|^(-alpha), |y_i| the response's tokens, or the result of `function`: `f(rows, **options)` ->
    [n], positive. f changes the size of the loss, and with it the effect of `optimizer.clip_grad`; a common
    factor has no effect on AdamW. With alpha = 0 it is GVPO with the teacher as its reference, beta = 1 and
    no rewards.

    `terms` names the parts of f (l - t) that are kept, as in GVPO's Table 2: without "var" the policy's own
    part is dropped, and the rest is linear in l; without "cov" the teacher's part is dropped. Both variants
    fail to train; they exist to show this.

    The teacher may have another tokenizer: t_i is then its log-prob of the response's text in its own tokens,
    and |y_i| stays the number of the policy's.

    The paper was not available: this loss was derived from its abstract and three summaries.
    """

    name: Literal["gvpo_plus_plus"] = "gvpo_plus_plus"
    alpha: float = Field(0.0, ge=-4, le=4)  # The exponent of the length weight; 0 weighs all alike.
    function: str | None = None  # A user's weight in place of the length's: `module:function`.
    options: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the function
    reference: Reference = TEACHER  # The policy that the trained policy is to become.
    norm: GroupNorm = "k-1"
    terms: tuple[Term, ...] = ("var", "cov")

    signal: ClassVar[Literal["none"]] = "none"
    couples_groups: ClassVar[bool] = True
    reference_sums_only: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True
    without_importance: ClassVar[str] = "its optimum is the same for every sampler of full support"

    @model_validator(mode="after")
    def _callable(self) -> GVPOPlusPlus:
        if self.function is not None:
            check_call(self.function, ("rows",), self.options)
        return self

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(
            alpha=(self.function is None, "function=null"),
            options=(self.function is not None, "a function"),
            reference=("cov" in self.terms, "cov among its terms"),
        )

    @property
    def reference_policies(self) -> References:
        return {"ref": self.reference} if "cov" in self.terms else {}

    @property
    def linear(self) -> bool:
        return not self.terms

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows, totals, logp_r = inputs.rows, inputs.totals, inputs.logp_r
        coef_n, weight_n = group_coefficients(rows, totals, self.norm), self._weights(rows)
        z_n = weight_n * log_ratio(inputs, self.terms)
        error_n = z_n - rows.group_mean(z_n)
        if "var" in self.terms:
            share = 0.5 * (coef_n * error_n**2).sum()
        else:
            share = (coef_n * error_n.detach() * weight_n * inputs.logp_n).sum()
        metrics = {"weighted_ratio_variance": (coef_n * error_n.detach() ** 2).sum()}
        if rows.ref_logp_r is not None and "cov" in self.terms:
            # The log-ratio's mean a token estimates KL(policy || teacher) on the policy's own samples.
            metrics["log_ratio"] = (logp_r.detach() - rows.ref_logp_r).sum() / totals.tokens
        return share, metrics

    def _weights(self, rows: TrainBatch) -> Tensor:
        """The weight f of every response, [n]. Raises UserFunctionError for a function's wrong values."""
        if self.function is None or not len(rows):  # a rank may have no rows of a mini-batch
            return rows.length_n.clamp(min=1).to(rows.reward_n.dtype) ** -self.alpha
        where = ("loss.function", self.function)
        value = call_function(*where, rows, **self.options)
        if not isinstance(value, torch.Tensor) or value.shape != (len(rows),) or value.is_complex():
            raise refused(*where, f"expected a tensor of shape ({len(rows)},), a weight for every response")
        weight_n = value.detach().to(rows.reward_n.device, rows.reward_n.dtype)
        if not bool((weight_n.isfinite() & (weight_n > 0)).all()):
            raise refused(*where, "a weight must be a finite number above 0")
        return weight_n
