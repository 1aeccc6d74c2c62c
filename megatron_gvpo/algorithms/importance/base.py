"""Corrections of a policy gradient for responses that a policy other than the trained one sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from megatron_gvpo.algorithms.base import Block, Metrics
from megatron_gvpo.types import BatchTotals, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG_RATIO = 20.0  # nats; e^88 is infinite in fp32, and weights beyond e^20 differ in nothing
Level = Literal["token", "sequence", "geometric"]


class Weighed(NamedTuple):
    """A weight of every token [r], and which tokens were truncated or dropped, bool [r]."""

    weight_r: Tensor
    truncated_r: Tensor
    dropped_r: Tensor


class Importance(Block):
    """Weight of every token's term in a policy gradient, without gradient of its own.

    With pi_old the policy at step start by the trainer, and pi_engine the policy that sampled by the engine,
    the ratio of token t of response i is, by `level`,

        token       r_it = pi_old(y_it) / pi_engine(y_it)
        sequence    the product of r_it over all tokens of the response
        geometric   the geometric mean of r_it over them: exp of the mean of log r_it

    A conversation is one response: the product and the mean are over the policy's own tokens of all its
    turns. Dropped tokens have weight 0 and still count in the loss's normaliser (`BatchTotals`).
    Both are over the tokens that could be sampled, with rollout.top_p, top_k or min_p.
    """

    needs_engine_logprobs: ClassVar[bool] = True

    name: str
    level: Level = "token"

    def __call__(self, rows: TrainBatch, totals: BatchTotals) -> tuple[Tensor, Metrics]:
        """Weights, fp32 [r], and shares of metrics, which add up over micro-batches and ranks.

        Raises ValueError if the engine gave no log-probs.
        """
        assert rows.old_logp_r is not None, "importance needs old log-probs (reference_policies)"
        if rows.engine_logp_r is None:
            raise ValueError("algorithm.loss.importance: the rollout engine gave no log-probs of its tokens")
        known_r = ~rows.engine_logp_r.isnan()  # no engine sampled demonstrations
        token_log_r = (rows.old_logp_r - rows.engine_logp_r).detach().where(known_r, 0)
        log_r = token_log_r
        if self.level != "token":
            log_n = rows.sequence_sum(token_log_r)
            if self.level == "geometric":
                log_n = log_n / rows.sequence_sum(known_r.to(log_n.dtype)).clamp(min=1)
            log_r = log_n[rows.seq_r]
        ratio_r = log_r.clamp(max=LARGEST_LOG_RATIO).exp()
        weight_r, truncated_r, dropped_r = self.weigh(rows, ratio_r, token_log_r)
        kept_n = rows.sequence_sum((~dropped_r).to(weight_r.dtype))
        return weight_r, {
            "importance": weight_r.sum() / totals.tokens,
            "importance_square": (weight_r**2).sum() / totals.tokens,
            "importance_truncated": truncated_r.sum() / totals.tokens,
            "importance_masked": dropped_r.sum() / totals.tokens,
            "importance_masked_responses": ((kept_n == 0) & (rows.length_n > 0)).sum() / totals.sequences,
        }

    def weigh(self, rows: TrainBatch, ratio_r: Tensor, token_log_r: Tensor) -> Weighed:
        """Weights from the ratios of `level` and the log-ratios of tokens, both [r]."""
        raise NotImplementedError


def effective_share(metrics: Mapping[str, float]) -> dict[str, float]:
    """The effective sample size as a share of the step's tokens, from sums over the whole step.

    (sum w)^2 / (T sum w^2) (Kong 1992): 1 where all weights are equal, 1 / T where one token has all weight.
    """
    if not (square := metrics.get("importance_square", 0.0)):
        return {"importance_ess": 0.0} if "importance_square" in metrics else {}
    return {"importance_ess": metrics["importance"] ** 2 / square}
