"""Reg-GRPO: regress the normalised log-ratio on the advantage (DeepVideo-R1, arXiv 2506.07464)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.base import STEP_START, Loss, Metrics, Reference, References, only_with
from megatron_gvpo.algorithms.losses import bounded
from megatron_gvpo.types import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class RegGRPO(Loss):
    """L = mean over groups of sum_i (A_i - z_i)^2 + kl_coef * k3, z = (d - dbar) / sqrt(var d + eps^2).

    d = l - l_old, k3 (mean over tokens) as in GRPO. The paper divides by the std, which is 0 as long as the
    policy is the old one; eps makes that point regular, and the gradient there 2 A / eps. The value of eps is
    not in the paper and is a choice. A group of one contributes nothing.
    """

    name: Literal["reg_grpo"] = "reg_grpo"
    eps: float = Field(0.1, gt=0)
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    kl_coef: float = Field(0.0, ge=0)
    reference: Reference = Reference(name="fixed")

    signal: ClassVar[Literal["advantage"]] = "advantage"
    couples_groups: ClassVar[bool] = True
    token_advantages: ClassVar[bool] = False

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(reference=(self.kl_coef > 0, "kl_coef above 0"))

    @property
    def only_after_updates(self) -> tuple[str, ...]:
        return ("ddof", "kl_coef") if self.reference == STEP_START else ("ddof",)

    @property
    def reference_policies(self) -> References:
        return {"old": STEP_START, "ref": self.reference} if self.kl_coef else {"old": STEP_START}

    @property
    def known_at_step_start(self) -> bool:
        return all(policy == STEP_START for policy in self.reference_policies.values())

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows, totals = inputs.rows, inputs.totals
        assert rows.advantage_n is not None, "Reg-GRPO needs an advantage a response (Loss.signal)"
        assert rows.old_logp_r is not None, "Reg-GRPO needs the log-probs at step start (reference_policies)"
        index_n, size_g = rows.groups
        k_n = size_g[index_n]
        drift_n = rows.sequence_sum(inputs.logp_r - rows.old_logp_r)
        centred_n = drift_n - rows.group_mean(drift_n)
        variance_n = rows.group_mean(centred_n**2) * k_n / (k_n - self.ddof).clamp(min=1)
        z_n = centred_n / (variance_n + self.eps**2).sqrt()
        error_n = (rows.advantage_n - z_n).where(k_n > 1, 0)
        loss = (error_n**2).sum() / totals.groups
        metrics = {"residual": (error_n.detach() ** 2).sum() / totals.sequences}
        if self.kl_coef:
            assert rows.ref_logp_r is not None, "kl_coef needs the reference's log-probs (reference_policies)"
            k3 = bounded.k3(rows.ref_logp_r - inputs.logp_r).sum() / totals.tokens
            loss, metrics["kl_ref"] = loss + self.kl_coef * k3, k3.detach()
        return loss, metrics
