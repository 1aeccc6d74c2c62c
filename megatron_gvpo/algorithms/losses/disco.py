"""DisCO: discriminative constrained optimization (arXiv 2505.12366), also as DRPO (arXiv 2510.04474)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.base import STEP_START, Loss, Metrics, References, only_with
from megatron_gvpo.algorithms.losses import bounded
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import LossInputs, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class DisCO(Loss):
    """L = -mean_x [ sum_i omega_i s_i - tau log mean_j exp(s_j / tau) ] + kl_coef / 2 [KL - kl_limit]_+^2.

    i runs over the right responses of a prompt (reward above `right`), j over the wrong ones; a group without
    both contributes 0 and counts in the mean. No ratio is clipped: the hinge on KL holds the policy near the
    one at step start.

    score        log_likelihood  s = l / |y|                     (tau 10)
                 ratio           s = mean over tokens of pi / pi_old   (tau 1)
    tau          null: the plain mean of the wrong ones' scores (DisCO-b)
    length_temperature  lambda of DRPO: omega_i ~ exp((1 - |y_i| / max_tokens) / lambda) over the right
                 responses, so that short ones weigh more; null: omega = 1 / n_+ (DisCO)

    KL is the mean of log pi_old - log pi over all response tokens of the optimizer step.
    """

    name: Literal["disco"] = "disco"
    score: Literal["log_likelihood", "ratio"] = "log_likelihood"
    tau: float | None = Field(10.0, gt=0)
    right: float = 0.5
    length_temperature: float | None = Field(None, gt=0)
    max_tokens: int | None = Field(None, gt=0)  # null: rollout.max_tokens
    kl_coef: float = Field(1000.0, ge=0)
    kl_limit: float = Field(1e-4, ge=0)

    signal: ClassVar[Literal["reward"]] = "reward"
    couples_groups: ClassVar[bool] = True
    couples_step: ClassVar[bool] = True  # the hinge on the step's KL couples them

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(
            max_tokens=(self.length_temperature is not None, "length_temperature"),
            kl_limit=(self.kl_coef > 0, "kl_coef above 0"),
        )

    @property
    def only_after_updates(self) -> tuple[str, ...]:
        return ("kl_coef", "kl_limit")

    @property
    def reference_policies(self) -> References:
        return {"old": STEP_START}

    @property
    def known_at_step_start(self) -> bool:
        # With log_likelihood, the softmax reads log-probs themselves, not only their differences.
        return self.score == "ratio" or self.tau is None

    @property
    def unset_length(self) -> str | None:
        return "max_tokens" if self.length_temperature is not None and self.max_tokens is None else None

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows, totals = inputs.rows, inputs.totals
        assert rows.old_logp_r is not None, "DisCO needs the log-probs at step start (reference_policies)"
        log_ratio_r = inputs.logp_r - rows.old_logp_r
        score_r = inputs.logp_r if self.score == "log_likelihood" else bounded.ratio(log_ratio_r)
        score_n = rows.sequence_mean(score_r)
        gap = score_n.new_zeros(())
        is_right = (rows.reward_n.cpu() > self.right).tolist()
        for group in rows.rows_of_groups:
            right = [i for i in group if is_right[i]]
            wrong = [i for i in group if not is_right[i]]
            if right and wrong:
                gap = gap + (self._weights(rows, right) * score_n[right]).sum()
                gap = gap - self._pooled(score_n[wrong])
        kl = -log_ratio_r.sum() / totals.tokens
        penalty = self.kl_coef / 2 * (kl - self.kl_limit).clamp(min=0) ** 2
        return penalty - gap / totals.groups, {"kl_step": kl.detach(), "gap": gap.detach() / totals.groups}

    def _weights(self, rows: TrainBatch, right: list[int]) -> Tensor:
        """omega of the right responses of one group, fp32 [p]; sums to 1."""
        length_p = rows.length_n[right].to(torch.float32)
        if self.length_temperature is None:
            return torch.ones_like(length_p) / len(length_p)
        assert self.max_tokens is not None, "the longest response is not known here (Block.sized)"
        return torch.softmax((1 - length_p / self.max_tokens) / self.length_temperature, 0)

    def _pooled(self, score_q: Tensor) -> Tensor:
        """tau log mean exp(s / tau): between the mean (tau large) and the largest (tau small)."""
        if self.tau is None:
            return score_q.mean()
        log_count = torch.tensor(float(len(score_q))).log().item()
        return self.tau * (torch.logsumexp(score_q / self.tau, 0) - log_count)
