"""Checks a step's updates by the recorded numbers alone, on a machine that cannot hold the model.

The loss is computed from recorded log-probs, which gives the weight of each token and the loss exactly. The
learning rate is compared with the schedule, the gradient's norm with the recorded norms of all tensors, and
the weights at the start of the step with those at the end of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import sqrt

from torch import Tensor

from megatron_gvpo.algorithms.base import token_weights
from megatron_gvpo.megatron.loss_pass import with_references
from megatron_gvpo.megatron.optimizer import learning_rate
from megatron_gvpo.observe.step_records import StepRecord, UpdateRecord, read, recorded_steps
from megatron_gvpo.replay.findings import (
    Finding,
    NotPossibleError,
    Tolerances,
    checked,
    first_difference,
    same_sums,
    scale_of,
    where,
)
from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import BatchTotals, TrainBatch


class NumbersReplay:
    """Checks a step's updates. `members`: each response's group and number in it, by position."""

    def __init__(
        self, config: Config, record: StepRecord, limits: Tolerances, members: Mapping[int, tuple[int, int]]
    ) -> None:
        self._config, self._record, self._limits, self._members = config, record, limits, members

    def findings(self, reason: str) -> Iterator[Finding]:
        """Yield the findings of all components of the model; `reason` says why there is no model."""

        def not_possible() -> None:
            raise NotPossibleError(reason)

        checks: dict[str, Callable[[], Finding | None]] = {
            "start weights": self._start_weights,
            "references": not_possible,
            "log-probs": not_possible,
            "loss weights": lambda: self._first_of(self._loss_weights),
            "loss": lambda: self._first_of(self._loss),
            "gradients": not_possible,
            "learning rate": lambda: self._first_of(self._learning_rate),
            "gradient norm": lambda: self._first_of(self._gradient_norm),
            "weights": not_possible,
        }
        return checked(self._record.step, checks.items())

    def _differs(
        self,
        component: str,
        text: str,
        number: int | None,
        response: int | None = None,
        token: int | None = None,
    ) -> Finding:
        updates = len(self._record.updates)
        at = "" if number is None or updates == 1 else f"update {number + 1} of {updates}: "
        at += "" if response is None else f"{where(response, self._members)}, token {token}: "
        return Finding(component, self._record.step, "differs", at + text, response, token)

    def _first_of(self, check: Callable[[int, UpdateRecord], Finding | None]) -> Finding | None:
        findings = (check(number, update) for number, update in enumerate(self._record.updates))
        return next((finding for finding in findings if finding is not None), None)

    def _start_weights(self) -> Finding | None:
        step = self._record.step
        if step - 1 not in recorded_steps(self._config.output_dir):
            raise NotPossibleError(
                f"step {step - 1} has no record, and the weights of step {step} need a model"
            )
        before = read(self._config.output_dir, step - 1)
        after = before.updates[-1].weights if before.updates else before.weights
        difference = same_sums(after, self._record.weights, 1e-9)
        if difference is None:
            return None
        name, problem = difference
        text = f"tensor {name}: {problem.replace('in the run', f'after step {step - 1}')}"
        text = text.replace("replayed", f"before step {step}")
        return Finding("start weights", step, "differs", text, tensor=name)

    def _computed(self, update: UpdateRecord) -> tuple[TrainBatch, Tensor, dict[str, float]]:
        """Return the update's rows and the loss's token weights and metrics. Raises NotPossibleError."""
        if update.logp_r is None or update.weight_r is None:
            raise NotPossibleError("the run recorded no log-probs of this update")
        loss = self._config.algorithm.loss.sized(self._config.rollout.max_tokens)
        if loss.wants_entropy or loss.divergence is not None:
            raise NotPossibleError("entropy and divergence need the model")
        rows = self._record.rows_of(update).with_group_tokens()
        filled = with_references(rows, update.logp_r)
        weight_r, metrics = token_weights(loss, filled, update.logp_r, BatchTotals.of(rows))
        return rows, weight_r, {name: float(value) for name, value in metrics.items()}

    def _loss_weights(self, number: int, update: UpdateRecord) -> Finding | None:
        rows, weight_r, _ = self._computed(update)
        assert update.weight_r is not None and rows.place_n is not None
        limit = self._limits.weight * scale_of(update.weight_r, weight_r)
        index = first_difference(update.weight_r, weight_r, limit)
        if index is None:
            return None
        row = int(rows.seq_r[index])
        text = f"{update.weight_r[index]:.6g} in the run, {weight_r[index]:.6g} replayed"
        token = index - rows.offsets[row]
        return self._differs("loss weights", text, number, int(rows.place_n[row]), token)

    def _loss(self, number: int, update: UpdateRecord) -> Finding | None:
        """Compare the loss and its metrics, as far as both the run and the loss itself have them."""
        _, _, again = self._computed(update)
        for name in ("loss", *sorted(update.metrics.keys() & again.keys() - {"loss"})):
            run, own = update.metrics[name], again[name]
            if not abs(run - own) <= self._limits.loss * max(1.0, abs(run), abs(own)) and run == run:
                return self._differs("loss", f"{name}: {run:.6g} in the run, {own:.6g} replayed", number)
        return None

    def _learning_rate(self, number: int, update: UpdateRecord) -> Finding | None:
        train = self._config.train
        count = (self._record.step - 1) * train.updates_per_step + number + 1
        own = learning_rate(self._config.optimizer, train.updates, count)
        if abs(update.lr - own) <= 1e-5 * max(update.lr, own):
            return None
        return self._differs(
            "learning rate", f"{update.lr:.6g} in the run; the schedule gives {own:.6g}", number
        )

    def _gradient_norm(self, number: int, update: UpdateRecord) -> Finding | None:
        """Check that the recorded norm follows from the recorded norms of the tensors' gradients."""
        own = sqrt(sum(norm * norm for _, norm, _ in update.gradients.values()))
        if abs(update.grad_norm - own) <= 1e-3 * max(update.grad_norm, own) or own != own:
            return None
        text = f"{update.grad_norm:.6g} in the run; the sums over its gradients give {own:.6g}"
        return self._differs("gradient norm", text, number)
