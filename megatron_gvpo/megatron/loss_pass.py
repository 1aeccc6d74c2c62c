"""The loss within an optimizer update: the contribution of each micro-batch, and their sum.

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
    logp_r: Tensor | None  # before the update, fp32 [r] on the CPU of every rank; None unless requested
    head: dict[str, float]  # how the head computed its gradient; depends on the machine
    memory: dict[str, float] = field(default_factory=dict)  # MemoryProfile.metrics of a run's first update
    weight_r: Tensor | None = None  # dL/dlogp at `logp_r`, fp32 [r] on the CPU; None unless requested
    # Sums over the gradient of each tensor, before clipping; empty unless requested.
    gradients: dict[str, TensorSum] = field(default_factory=dict)


class MicroBatchResult(NamedTuple):
    """A micro-batch's log-probs, dL/dlogp if the pass computed it, and its part of the metrics."""

    logp_r: Tensor
    weight_r: Tensor | None
    metrics: Metrics


class Surrogate(NamedTuple):
    """A scalar with the gradient of a micro-batch's part of the loss, dL/dlogp if known here, and metrics."""

    scalar: Tensor
    weight_r: Tensor | None
    metrics: Metrics


class LossPass(ABC):
    """Turns the head's output for a micro-batch into the scalar that is differentiated."""

    def __init__(self, loss: Loss, totals: BatchTotals) -> None:
        self._loss, self._totals = loss, totals
        self._problem: UserFunctionError | None = None  # the first error that the user's loss raised

    def __call__(self, rows: TrainBatch, values: tuple[Any, ...]) -> tuple[Tensor, MicroBatchResult]:
        """Return a scalar whose gradient is the micro-batch's part of the loss's gradient, and the result."""
        output = LinearLogprob(*values)
        surrogate = self._surrogate(rows, output)
        bonus, bonus_metrics = self._bonus(output)
        head_metrics = _head_metrics(rows, output, self._totals)
        metrics = detached(surrogate.metrics | head_metrics | bonus_metrics)
        result = MicroBatchResult(output.logp_r.detach(), surrogate.weight_r, metrics)
        return surrogate.scalar + bonus, result

    @abstractmethod
    def _surrogate(self, rows: TrainBatch, output: LinearLogprob) -> Surrogate:
        """Return the micro-batch's part of the loss without the terms that the head computes."""

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
        summed = self._summed(rows, logp_r, sum_over_ranks(floats([result.metrics for result in results])))
        metrics = summed | {"loss": self._with_head_terms(summed)}
        return metrics | self._loss.derived(metrics)

    def _with_head_terms(self, metrics: Metrics) -> float:
        """Return the update's loss: that of the log-probs with the entropy bonus and the divergence.

        A rehearsed rank has its own metrics only, and a pipeline stage without the head has none: then 0.
        """
        loss: float = metrics.get("loss", 0.0)
        if self._loss.wants_entropy:
            loss -= self._loss.entropy_coef * metrics.get("entropy", 0.0)
        if self._loss.divergence is not None:
            loss += self._loss.divergence.coef * metrics.get("divergence", 0.0)
        return loss

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

    def _surrogate(self, rows: TrainBatch, output: LinearLogprob) -> Surrogate:
        if output.surrogate is not None:
            return Surrogate(output.surrogate, None, {})
        # With an entropy bonus the head gets no weights.
        assert rows.weight_r is not None, "a split group needs its weights before the forward"
        return Surrogate((rows.weight_r * output.logp_r).sum(), None, {})

    def _summed(self, rows: TrainBatch, logp_r: Tensor | None, summed: Metrics) -> Metrics:
        assert logp_r is not None
        value, metrics = self._loss(LossInputs(with_references(rows, logp_r), logp_r, self._totals))
        return floats([{"loss": value, **metrics}])[0] | summed


class LossInForward(LossPass):
    """Every micro-batch has whole groups: the loss is a sum over micro-batches."""

    def _surrogate(self, rows: TrainBatch, output: LinearLogprob) -> Surrogate:
        logp_r = output.logp_r.detach()
        filled = with_references(rows, logp_r)
        try:
            if output.surrogate is None:  # one call of the loss gives its value and the weights
                weight_r, metrics = token_weights(self._loss, filled, logp_r, self._totals)
                return Surrogate((weight_r * output.logp_r).sum(), weight_r, metrics)
            value, metrics = self._loss(LossInputs(filled, output.logp_r, self._totals))
            return Surrogate(output.surrogate, None, {"loss": value, **metrics})
        except UserFunctionError as error:
            self._problem = self._problem or error
            # The scalar keeps the graph, because this rank's backward takes part in collectives with the
            # other ranks. `raise_problem` ends the update, so the gradient is not used.
            scalar = 0 * output.logp_r.sum() if output.surrogate is None else output.surrogate
            return Surrogate(scalar, None, {"loss": output.logp_r.new_zeros(())})

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
