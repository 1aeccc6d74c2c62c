"""Advantages with a bonus by the likelihood of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.advantages.estimator import component, normalised
from megatron_gvpo.algorithms.base import Advantage, Component, Metrics, Reference, References
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


# GRPO-CARE: a bonus for right answers that follow from their reasoning (arXiv 2506.16141).


class ConfidenceEstimator(Advantage):
    """GRPO's advantage of r_i + coef acc_i [p_i >= mean of p over the eligible - slack], fp32 [n].

    p_i = min(exp(mean log-prob of the answer's tokens under `reference`), cap) measures how likely a slow
    copy of the policy finds the answer after the reasoning. The answer is the tokens after the last of
    `marker_ids` in the response, up to the next of `close_ids` or the end token; without a marker it is the
    complete response. acc is the reward, or its component `accuracy`. A response is eligible if its acc is
    above `right` and not below its group's mean; the others have no bonus.
    """

    name: Literal["confidence"] = "confidence"
    accuracy: str | None = None
    marker_ids: tuple[int, ...] = ()
    close_ids: tuple[int, ...] = ()
    coef: float = Field(0.5, ge=0)
    cap: float = Field(0.95, gt=0, le=1)
    slack: float = Field(0.01, ge=0)
    right: float = 0.1
    reference: Reference = Reference(name="ema", decay=0.995)
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-6, ge=0)  # added to the std, so that nothing is divided by 0

    @property
    def components_read(self) -> tuple[Component, ...]:
        return () if self.accuracy is None else (self.accuracy,)

    @property
    def reference_policies(self) -> References:
        return {"ref": self.reference}

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        bonus_n = self.bonus(rows)
        advantage_n = normalised(rows, rows.reward_n.double() + bonus_n, self.ddof, self.eps)
        return advantage_n.float(), {"bonus": bonus_n.mean()}

    def bonus(self, rows: TrainBatch) -> Tensor:
        """The bonus of each response, fp64 [n]."""
        accuracy_n = rows.reward_n.double()
        if self.accuracy is not None:
            accuracy_n = component(rows, self.accuracy, "accuracy")
        eligible_n = (accuracy_n > self.right) & (accuracy_n >= rows.group_mean(accuracy_n) - 1e-9)
        sure_n = self.confidence(rows)
        index_n, size_g = rows.groups
        count_g = torch.zeros(len(size_g), dtype=torch.float64).index_add(0, index_n, eligible_n.double())
        sum_g = torch.zeros_like(count_g).index_add(0, index_n, sure_n.where(eligible_n, 0))
        mean_n = (sum_g / count_g.clamp(min=1))[index_n]
        return (self.coef * accuracy_n).where(eligible_n & (sure_n >= mean_n - self.slack), 0)

    def confidence(self, rows: TrainBatch) -> Tensor:
        """p of every response, fp64 [n]; min(1, cap) for an empty answer."""
        assert rows.ref_logp_r is not None, "see Advantage.reference_policies"
        ended = (~rows.truncated_n).tolist()
        answers = [self._in_answer(ids, end) for ids, end in zip(rows.response_ids, ended, strict=True)]
        answer_r = torch.tensor([inside for answer in answers for inside in answer], dtype=torch.bool)
        count_n = rows.sequence_sum(answer_r.double()).clamp(min=1)
        mean_n = rows.sequence_sum(rows.ref_logp_r.double().where(answer_r, 0)) / count_n
        return mean_n.exp().clamp(max=self.cap)

    def _in_answer(self, ids: Sequence[int], ended: bool) -> list[bool]:
        """Return a mask that is true for the tokens of the answer.

        `ended`: the last token is the end token.
        """
        markers = [t for t, token in enumerate(ids) if token in self.marker_ids]
        first = markers[-1] + 1 if markers else 0
        closing = (t for t in range(first, len(ids)) if ids[t] in self.close_ids)
        behind = next(closing, len(ids) - ended)
        return [first <= t < behind for t in range(len(ids))]


# XRPO's novelty bonus: right answers that were unlikely count more (arXiv 2510.06672).


class NoveltyEstimator(Advantage):
    """A+ = A + min(max(bonus (1 - eta), 0), cap A) where A > 0, A elsewhere; fp32 [n].

    A is GRPO's advantage, eta = exp(s - mean s), s the mean log-prob a token by the engine that sampled, its
    mean over the group's responses that the engine sampled; others have no bonus. The defaults of bonus and
    cap are a third party's. For A < 0 the literal formula would make advantages more negative.
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
