"""The loss within an optimizer update: what a micro-batch contributes, and what the micro-batches add up to.

A pass is called with every micro-batch on the last pipeline stage. `LossInForward` computes the loss there.
`KnownWeights` serves where a group or a row is divided between micro-batches: the loss is defined on whole
groups, so its gradient is known before the forward, and its value is computed afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from megatron_gvpo.algorithms.base import Loss, token_weights
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.megatron.microbatch import detached, floats, sum_over_ranks
from megatron_gvpo.megatron.optimizer import Update
from megatron_gvpo.megatron.tensor_sums import TensorSum
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

Metrics = dict[str, Any]


@dataclass(frozen=True)
class UpdateResult:
    """An optimizer update, and the loss and metrics before it."""

    update: Update
    metrics: dict[str, float]  # includes "loss"
    logp_r: Tensor | None  # before the update, fp32 [r] on the CPU of every rank; None unless asked for
    head: dict[str, float]  # how the head computed its gradient; depends on the machine
    memory: dict[str, float] = field(default_factory=dict)  # MemoryProfile.metrics of a run's first update
    weight_r: Tensor | None = None  # dL/dlogp at `logp_r`, fp32 [r] on the CPU; None unless asked for
    # Sums over the gradient of each tensor, before clipping; empty unless asked for.
    gradients: dict[str, TensorSum] = field(default_factory=dict)


class MicroBatchResult(NamedTuple):
    """A micro-batch's log-probs, dL/dlogp if the pass computed it, and its part of the metrics."""

    logp_r: Tensor
    weight_r: Tensor | None
    metrics: Metrics


class LossPass(ABC):
    """Turns the head's output for a micro-batch into the scalar that is differentiated."""

    def __init__(self, loss: Loss, totals: BatchTotals) -> None:
        self._loss, self._totals = loss, totals
        self._problem: UserFunctionError | None = None  # the first error that the user's loss raised

    def __call__(self, rows: TrainBatch, values: tuple[Any, ...]) -> tuple[Tensor, MicroBatchResult]:
        """Return the scalar, whose gradient is the micro-batch's part of the loss's, and the result."""
        output = LinearLogprob(*values)
        scalar, weight_r, metrics = self._surrogate(rows, output)
        bonus, of_bonus = self._bonus(output)
        metrics = detached(metrics | _head_metrics(rows, output, self._totals) | of_bonus)
        return scalar + bonus, MicroBatchResult(output.logp_r.detach(), weight_r, metrics)

    @abstractmethod
    def _surrogate(self, rows: TrainBatch, output: LinearLogprob) -> tuple[Tensor, Tensor | None, Metrics]:
        """Return a scalar with the loss's gradient, dL/dlogp if it is computed here, and metrics."""

    @abstractmethod
    def _summed(self, rows: TrainBatch, logp_r: Tensor | None, summed: Metrics) -> Metrics:
        """Return the loss and its metrics; `summed`: the metrics of all micro-batches of all ranks."""

    def raise_problem(self) -> None:
        """Raise the UserFunctionError of this rank's micro-batches, if there is one.

        It is not raised in the pass, because the other ranks are in the same pipeline schedule.
        """
        if self._problem is not None:
            raise self._problem

    def metrics(
        self, rows: TrainBatch, logp_r: Tensor | None, results: Sequence[MicroBatchResult]
    ) -> dict[str, float]:
        """Return the update's loss and metrics. A collective. `logp_r`: the log-probs of all rows."""
        loss = self._loss
        metrics = self._summed(rows, logp_r, sum_over_ranks(floats([result.metrics for result in results])))
        if loss.wants_entropy:
            metrics["loss"] -= loss.entropy_coef * metrics["entropy"]
        if loss.divergence is not None:
            metrics["loss"] += loss.divergence.coef * metrics["divergence"]
        return metrics | loss.derived(metrics)

    def _bonus(self, output: LinearLogprob) -> tuple[Tensor, Metrics]:
        """Return the terms that the head computes beside the log-probs: entropy bonus and divergence."""
        bonus, metrics = output.logp_r.new_zeros(()), Metrics()
        if output.entropy_r is not None:
            mean = output.entropy_r.sum() / self._totals.tokens
            bonus, metrics["entropy"] = -self._loss.entropy_coef * mean, mean
        if output.divergence is not None and output.divergence_r is not None:
            bonus = bonus + output.divergence
            metrics["divergence"] = output.divergence_r.sum() / self._totals.tokens
        return bonus, metrics


class KnownWeights(LossPass):
    """The rows have their weights dL/dlogp; the loss is computed once, on all rows, after the pass."""

    def _surrogate(self, rows: TrainBatch, output: LinearLogprob) -> tuple[Tensor, Tensor | None, Metrics]:
        if output.surrogate is not None:
            return output.surrogate, None, {}
        # With an entropy bonus the head gets no weights.
        assert rows.weight_r is not None, "a split group needs its weights before the forward"
        return (rows.weight_r * output.logp_r).sum(), None, {}

    def _summed(self, rows: TrainBatch, logp_r: Tensor | None, summed: Metrics) -> Metrics:
        assert logp_r is not None
        value, metrics = self._loss(LossInputs(with_references(rows, logp_r), logp_r, self._totals))
        return floats([{"loss": value, **metrics}])[0] | summed


class LossInForward(LossPass):
    """Every micro-batch has whole groups: the loss is a sum over micro-batches."""

    def _surrogate(self, rows: TrainBatch, output: LinearLogprob) -> tuple[Tensor, Tensor | None, Metrics]:
        logp_r = output.logp_r.detach()
        filled = with_references(rows, logp_r)
        try:
            if output.surrogate is None:  # one call of the loss gives its value and the weights
                weight_r, metrics = token_weights(self._loss, filled, logp_r, self._totals)
                return (weight_r * output.logp_r).sum(), weight_r, metrics
            value, metrics = self._loss(LossInputs(filled, output.logp_r, self._totals))
            return output.surrogate, None, {"loss": value, **metrics}
        except UserFunctionError as error:
            self._problem = self._problem or error
            zero = 0 * output.logp_r.sum()
            return zero, None, {"loss": zero}

    def _summed(self, rows: TrainBatch, logp_r: Tensor | None, summed: Metrics) -> Metrics:
        return summed


def with_references(rows: TrainBatch, logp_r: Tensor) -> TrainBatch:
    """Fill missing old and reference log-probs with the present policy's."""
    old = logp_r if rows.old_logp_r is None else rows.old_logp_r
    reference = old if rows.ref_logp_r is None else rows.ref_logp_r
    return rows.with_columns(old_logp_r=old, ref_logp_r=reference)


def _head_metrics(rows: TrainBatch, output: LinearLogprob, totals: BatchTotals) -> dict[str, Tensor | float]:
    """Return a micro-batch's part of the metrics head/*, which add up over micro-batches.

    `head/known` and `head/stash` are shares of the step's tokens, by the head's mode. `head/stash_mb` is the
    MiB that a rank stashed, averaged over tokens.
    """
    share = rows.offsets[-1] / totals.tokens
    return {
        "head/known": share * (output.mode == "weights_first"),
        "head/stash": share * output.stash_share,
        "head/stash_mb": share * output.stash_bytes / 2**20,
    }
