"""On-policy distillation: a token's advantage is the teacher's log-prob minus the policy's."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.advantages.gae import gae
from megatron_gvpo.algorithms.base import STEP_START, TEACHER, Advantage, Metrics, Reference, References
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class Distillation(Advantage):
    """A_t = A^R_t + coef * sum_{s >= t} discount^(s-t) [log pi_teacher(y_s) - log pi(y_s)], fp32 [r].

    pi is the policy at step start, by the trainer; both log-probs are of the sampled token, at the sampling
    temperature. With discount 0 the expected policy gradient is that of KL(pi || pi_teacher) at every
    position, averaged over the positions that the policy visits: sampled-token reverse KL (Agarwal et al.,
    On-Policy Distillation of Language Models, arXiv 2306.13649, with reverse KL and the policy's own samples;
    in this form Lu and Thinking Machines Lab, On-Policy Distillation, 2025,
    thinkingmachines.ai/blog/on-policy-distillation). With discount 1 it is the gradient of the KL of whole
    responses, and has more variance. In a conversation t counts the policy's own tokens.

    rewards    the estimator of A^R, the advantages of rewards; null: there are none, and no reward is read
    reference  the policy to learn from; `{name: ema, decay: 0.99}` is the policy's own average
    """

    per_token: ClassVar[bool] = True

    name: Literal["distillation"] = "distillation"
    coef: float = Field(1.0, gt=0)
    discount: float = Field(0.0, ge=0, le=1)
    rewards: Estimator | None = None
    reference: Reference = TEACHER

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.reference == STEP_START:
            raise ValueError("reference=step_start: the policy would learn from itself alone")
        return self

    @property
    def makes_rewards(self) -> bool:  # type: ignore[override]
        return self.rewards is None

    @property
    def needs_group(self) -> bool:
        return self.rewards is not None and self.rewards.needs_group

    @property
    def reference_policies(self) -> References:
        return {"old": STEP_START, "ref": self.reference}

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        assert rows.old_logp_r is not None and rows.ref_logp_r is not None, "see Advantage.reference_policies"
        gain_r = rows.ref_logp_r.double() - rows.old_logp_r.double()
        metrics = {"teacher_kl": -gain_r.mean() if len(gain_r) else torch.zeros(())}
        if self.discount and len(gain_r):
            gain_r = gae(gain_r, torch.zeros_like(gain_r), rows.length_n.tolist(), self.discount, 1.0)
        advantage_r = self.coef * gain_r
        if self.rewards is not None:
            of_rewards_n, more = self.rewards(rows)
            advantage_r = advantage_r + of_rewards_n[rows.seq_r]
            metrics |= more
        return advantage_r.float(), metrics
