"""XRPO's novelty bonus: right answers that were unlikely count more (arXiv 2510.06672)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.advantages.estimator import normalised
from megatron_gvpo.algorithms.base import Advantage, Metrics
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class NoveltyEstimator(Advantage):
    """A+ = A + min(max(bonus (1 - eta), 0), cap A) where A > 0, A elsewhere; fp32 [n].

    A is GRPO's advantage, eta = exp(s - mean s), s the mean log-prob a token by the engine that sampled, its
    mean over the group's responses that one sampled; others have no bonus. The defaults of bonus and cap are
    a third party's. On A < 0 the formula, read literally, would punish more.
    """

    needs_engine_logprobs: ClassVar[bool] = True

    name: Literal["novelty"] = "novelty"
    bonus: float = Field(1.0, ge=0)
    cap: float = Field(1.0, ge=0)
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-6, ge=0)  # added to the std, so that nothing is divided by 0

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        if rows.engine_logp_r is None:
            raise ValueError("estimator=novelty: the rollout engine gave no log-probs of its tokens")
        score_n = rows.sequence_mean(rows.engine_logp_r.double())
        known_n = ~score_n.isnan()
        share_n = rows.group_mean(known_n.double())
        novelty_n = 1 - (score_n - rows.group_mean(score_n.where(known_n, 0)) / share_n).exp()
        advantage_n = normalised(rows, rows.reward_n, self.ddof, self.eps)
        bonus_n = (self.bonus * novelty_n).clamp(min=0).minimum(self.cap * advantage_n)
        bonus_n = bonus_n.where(advantage_n > 0, 0).nan_to_num()
        return (advantage_n + bonus_n).float(), {"novelty": bonus_n.mean()}
