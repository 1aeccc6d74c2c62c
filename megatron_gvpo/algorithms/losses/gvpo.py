"""GVPO: Group Variance Policy Optimization (arXiv 2504.19599)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.base import STEP_START, Loss, Metrics, Reference, References, only_with
from megatron_gvpo.algorithms.losses import bounded
from megatron_gvpo.algorithms.losses.aggregation import GroupNorm, group_coefficients
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


Term = Literal["var", "cov"]


def log_ratio(inputs: LossInputs, terms: Collection[Term]) -> Tensor:
    """l - l' of every response, [n]: the policy's part l without "var", the reference's l' without "cov"."""
    rows, logp_r = inputs.rows, inputs.logp_r
    ratio_r = logp_r if "var" in terms else torch.zeros_like(logp_r)
    if "cov" in terms:
        assert rows.ref_logp_r is not None, "the loss needs the reference's log-probs (reference_policies)"
        ratio_r = ratio_r - rows.ref_logp_r
    # Token differences first: sums of thousands of log-probs would cancel badly in fp32.
    return rows.sequence_sum(ratio_r)


class GVPO(Loss):
    """Regress the centred implicit reward of a group on its centred reward.

    For k responses y_i of a prompt with rewards R_i, l_i = log pi(y_i) (summed over tokens), l'_i the same
    under the reference policy, d = l - l', bars for group means:

        e_i     = (R_i - Rbar) - beta (d_i - dbar)
        dL/dl_i = -beta e_i                          (eq. 8; sums to 0 over the group, so log Z cancels)

    which three losses have as their gradient (section 3.2), to be chosen with `form`:

        mse       1/2 sum_i e_i^2
        variance  1/2 sum_i [z_i - zbar]^2,  z = beta d - R
        nll       -beta sum_i stopgrad(e_i) l_i

    `norm` divides the group sum (paper code: k-1), then groups are averaged. `terms` names the parts of beta
    (d - dbar) = beta (l - lbar) - beta (l' - l'bar) that are kept (Table 2): without "var" the first is
    dropped, and the rest of the loss is linear in l; without "cov" the second is dropped, and with it the
    reference policy.

    Takes raw rewards. A group with equal rewards still has a gradient where its d_i differ.
    """

    name: Literal["gvpo"] = "gvpo"
    # Strength of the pull towards the reference policy: the implicit reward is beta times the log-ratio.
    beta: float = Field(0.1, gt=0)
    reference: Reference = STEP_START
    norm: GroupNorm = "k-1"
    form: Literal["mse", "variance", "nll"] = "mse"
    terms: tuple[Term, ...] = ("var", "cov")

    signal: ClassVar[Literal["reward"]] = "reward"
    couples_groups: ClassVar[bool] = True
    reference_sums_only: ClassVar[bool] = True
    without_importance: ClassVar[str] = (
        "its optimum is the same for every sampler of full support, arXiv 2504.19599, Theorem 3.2"
    )

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(
            reference=("cov" in self.terms, "cov among its terms"),
            form=("var" in self.terms, "var among its terms"),
        )

    @property
    def reference_policies(self) -> References:
        return {"ref": self.reference} if "cov" in self.terms else {}

    @property
    def linear(self) -> bool:
        return not self.terms

    @property
    def known_at_step_start(self) -> bool:
        # With only one of the terms, the loss reads l or l' by itself and not only as l - l'.
        return self.linear or (set(self.terms) == {"var", "cov"} and self.reference == STEP_START)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows, totals = inputs.rows, inputs.totals
        coef_n = group_coefficients(rows, totals, self.norm)

        def centred(value_n: Tensor) -> Tensor:
            return value_n - rows.group_mean(value_n)

        implicit_n = self.beta * log_ratio(inputs, self.terms)
        error_n = centred(rows.reward_n) - centred(implicit_n)
        if self.form == "nll" or "var" not in self.terms:
            share = -self.beta * (coef_n * error_n.detach() * inputs.logp_n).sum()
        elif self.form == "mse":
            share = 0.5 * (coef_n * error_n**2).sum()
        else:
            share = 0.5 * (coef_n * centred(implicit_n - rows.reward_n) ** 2).sum()

        unbiased_n = group_coefficients(rows, totals, "k-1")
        metrics = {
            "reward_variance": (unbiased_n * centred(rows.reward_n) ** 2).sum(),
            "residual_variance": (unbiased_n * error_n.detach() ** 2).sum(),
        }
        if rows.ref_logp_r is not None and "cov" in self.terms:
            # Schulman's k3 of KL(reference || policy) per token: exact in expectation over the reference's
            # samples, and never negative.
            log_ratio_r = inputs.logp_r.detach() - rows.ref_logp_r
            metrics["kl"] = bounded.k3(log_ratio_r).sum() / totals.tokens
        return share, metrics
