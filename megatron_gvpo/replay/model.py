"""Replays the numbers that need the model: log-probs, token weights of the loss, gradients, model weights.

The model starts from the newest checkpoint before the step, or from `model.path`, and repeats the recorded
updates up to the step. Each of them is compared, so the first difference may be in an earlier step than the
requested one. An update uses the run's recorded weights of tokens, so that a fault of the loss does not
appear as a fault of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.algorithms.base import STEP_START, TEACHER, token_weights
from megatron_gvpo.checks.teacher import teacher_reads_text
from megatron_gvpo.megatron.checkpoint.load import load_policy
from megatron_gvpo.megatron.loss_pass import UpdateResult, with_references
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.observe.step_records import StepRecord, Sums, UpdateRecord
from megatron_gvpo.replay.findings import (
    Finding,
    TensorDifference,
    Tolerances,
    compare_gradients,
    compare_weights,
    first_difference,
    same_sums,
    scale_of,
    where,
)
from megatron_gvpo.replay.parts import Parts, counted_otherwise
from megatron_gvpo.runs.existing_run import checkpoint_steps
from megatron_gvpo.runs.written import step_name
from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import BatchTotals, TrainBatch


@dataclass(frozen=True)
class Start:
    """The step after which a replay starts, and its checkpoint; None: `model.path`, before step 1."""

    step: int
    checkpoint: Path | None

    @staticmethod
    def before(output_dir: str, step: int, recorded: Sequence[int]) -> Start | None:
        """Return the newest start from which every step up to `step` is recorded, or None."""
        missing = [s for s in range(1, step) if s not in recorded]
        first = max(missing, default=0)
        for own in reversed([0, *checkpoint_steps(Path(output_dir))]):
            if first <= own < step:
                checkpoint = Path(output_dir) / "checkpoints" / step_name(own)
                return Start(own, checkpoint if own else None)
        return None


class ModelReplay:
    """A policy that repeats a run's recorded updates. `original`: the run's own configuration."""

    def __init__(self, config: Config, original: Config, start: Start, limits: Tolerances) -> None:
        self._config, self._original, self._limits = config, original, limits
        self.policy = Policy.of(config)
        self.start = start
        # Each response's group and its number in the group, by its position in the current step.
        self.members: dict[int, tuple[int, int]] = {}
        self.state: dict[str, Any] = {}  # the trainer's state in the checkpoint
        if start.checkpoint is not None:
            self.state = load_policy(start.checkpoint, self.policy)
            # As in a resumed run, whose earlier steps may have had another number of updates.
            self.policy.follow_schedule(start.step * config.train.updates_per_step)

    def findings(self, record: StepRecord) -> Iterator[Finding]:
        """Repeat a step, and yield the findings of its components up to the first that differs."""
        for finding in self._steps(record):
            yield finding
            if finding.outcome == "differs":
                return

    def _steps(self, record: StepRecord) -> Iterator[Finding]:
        self._record, self._update = record, ""
        before = self.policy.tensor_sums.take("weights")
        difference = same_sums(record.weights, before, self._weights_limit)
        yield self._of_tensor("start weights", difference)
        yield from self._references()
        run_before, later = record.weights, list[Finding]()
        for i, update in enumerate(record.updates):
            self._update = f"update {i + 1} of {len(record.updates)}: " if len(record.updates) > 1 else ""
            rows = self._record.rows_of(update)
            self._keep_weights()
            result = self.policy.update(
                rows.with_columns(weight_r=update.weight_r),
                at_step_start=i == 0,
                keep_weights=True,
                keep_gradients=True,
            )
            after = self.policy.tensor_sums.take("weights")
            later = [
                *self._of_update(update, rows, result),
                self._weights((run_before, update.weights), (before, after), update.lr),
            ]
            if any(finding.outcome == "differs" for finding in later):
                break
            run_before, before = update.weights, after
        else:
            self._end_step(len(record.updates))
        yield from later

    @property
    def _weights_limit(self) -> float:
        return 1e-5 if self._config.model.dtype == "float32" else 1e-3

    def _end_step(self, updates: int) -> None:
        self.policy.skip_updates(self._config.train.updates_per_step - updates)
        self.policy.end_step()

    def _finding(
        self, component: str, problem: str | None, response: int | None = None, **position: Any
    ) -> Finding:
        if problem is None:
            return Finding(component, self._record.step, "equal")
        at = [] if response is None else [where(response, self.members)]
        at += [f"{name} {value}" for name, value in position.items() if value is not None]
        text = self._update + (f"{', '.join(at)}: {problem}" if at else problem)
        return Finding(component, self._record.step, "differs", text, response, **position)

    def _of_tensor(self, component: str, difference: TensorDifference | None) -> Finding:
        if difference is None:
            return self._finding(component, None)
        return self._finding(component, difference.text, tensor=difference.tensor)

    def _column(
        self, component: str, rows: TrainBatch, recorded: Tensor, again: Tensor, limit: float
    ) -> Finding:
        """Compare a column of tokens.

        A finding names the first token that differs, and the part of the update, if any, that has all rows
        with such tokens.
        """
        index = first_difference(recorded, again, limit)
        if index is None:
            return self._finding(component, None)
        apart_r = ~torch.isclose(recorded.double(), again.double(), rtol=0.0, atol=limit, equal_nan=True)
        wrong = sorted(set(rows.seq_r[apart_r].tolist()))
        row = int(rows.seq_r[index])
        problem = (
            f"{recorded[index]:.6g} in the run, {again[index]:.6g} replayed; {int(apart_r.sum())} of "
            f"{len(apart_r)} tokens of {len(wrong)} of {len(rows)} responses differ"
        )
        parts = self._parts(rows)
        if (part := parts.rank_of(wrong) or parts.around(wrong)) is not None and len(wrong) > 1:
            problem += f", and all of these are of {part}"
        return self._finding(component, problem, self._position(rows, row), token=index - rows.offsets[row])

    def _position(self, rows: TrainBatch, row: int) -> int:
        assert rows.place_n is not None
        return int(rows.place_n[row])

    def _parts(self, rows: TrainBatch) -> Parts:
        return Parts.of(rows, self._original, self._record.data_parallel, self.policy)

    def _references(self) -> Iterator[Finding]:
        """Check the log-probs of the reference policies that the loss compares with."""
        references = self._config.algorithm.loss.reference_policies
        by_engine = self._config.algorithm.reference_logprobs == "engine"
        for update in self._record.updates:
            rows = self._record.rows_of(update)
            for column, reference in references.items():
                recorded = update.old_logp_r if column == "old" else update.ref_logp_r
                if recorded is None or (by_engine and reference == STEP_START):
                    continue
                if reference == STEP_START:
                    again = self.policy.score(rows)
                elif reference != TEACHER:
                    again = self.policy.score_reference(rows)
                elif self.policy.teacher is not None and not teacher_reads_text(self._original):
                    again = self.policy.score_teacher(rows)
                else:
                    is_served = self.policy.teacher is None
                    text = f"the teacher {'is behind a server' if is_served else 'read texts, not tokens'}"
                    yield Finding("references", self._record.step, "not checked", text)
                    continue
                finding = self._column("references", rows, recorded, again, self._limits.logp)
                if finding.outcome == "differs":
                    yield finding
                    return
        yield self._finding("references", None)

    def _of_update(self, update: UpdateRecord, rows: TrainBatch, result: UpdateResult) -> Iterator[Finding]:
        limits = self._limits
        if update.logp_r is not None and result.logp_r is not None:
            yield self._column("log-probs", rows, update.logp_r, result.logp_r, limits.logp)
            if update.weight_r is not None and not self._config.algorithm.loss.wants_entropy:
                again, _ = self._loss_weights(rows, update.logp_r)
                limit = limits.weight * scale_of(update.weight_r, again)
                yield self._column("loss weights", rows, update.weight_r, again, limit)
        yield self._loss(update, result)
        yield self._gradients(update, rows, result)
        is_wrong = abs(update.lr - result.update.lr) > 1e-5 * max(update.lr, result.update.lr)
        rate = f"{update.lr:.6g} in the run; the schedule gives {result.update.lr:.6g}"
        yield self._finding("learning rate", rate if is_wrong else None)
        yield self._gradient_norm(update, result)

    def _loss_weights(self, rows: TrainBatch, logp_r: Tensor) -> tuple[Tensor, Any]:
        loss = self._config.algorithm.loss.sized(self._config.rollout.max_tokens)
        rows_of_groups = rows.with_group_tokens()
        return token_weights(
            loss, with_references(rows_of_groups, logp_r), logp_r, BatchTotals.of(rows_of_groups)
        )

    def _loss(self, update: UpdateRecord, result: UpdateResult) -> Finding:
        """Compare the loss and its metrics; the tolerance is relative to the larger value, or to 1."""
        run, again = update.metrics, result.metrics
        for name in ("loss", *sorted(run.keys() & again.keys() - {"loss"})):
            if name not in run or name not in again:
                continue
            scale = max(1.0, abs(run[name]), abs(again[name]))
            limit = max(self._limits.loss, self._limits.logp) * scale
            if not abs(run[name] - again[name]) <= limit and run[name] == run[name]:
                return self._finding(
                    "loss", f"{name}: {run[name]:.6g} in the run, {again[name]:.6g} replayed"
                )
        return self._finding("loss", None)

    def _gradients(self, update: UpdateRecord, rows: TrainBatch, result: UpdateResult) -> Finding:
        difference = compare_gradients(update.gradients, result.gradients, self._limits.gradient)
        if difference is None:
            return self._finding("gradients", None)
        tensor, problem = difference
        if update.weight_r is not None:
            self._put_back()
            weighted = rows.with_columns(weight_r=update.weight_r)
            cause = counted_otherwise(self.policy, weighted, update.gradients, self._parts(rows))
            problem += f"; {cause}" if cause else ""
        return self._finding("gradients", problem, tensor=tensor)

    def _gradient_norm(self, update: UpdateRecord, result: UpdateResult) -> Finding:
        is_wrong = abs(update.grad_norm - result.update.grad_norm) > self._limits.gradient * max(
            update.grad_norm, result.update.grad_norm
        )
        text = f"{update.grad_norm:.6g} in the run, {result.update.grad_norm:.6g} replayed"
        if update.is_skipped != result.update.skipped:
            return self._finding("gradient norm", f"skipped={update.is_skipped} in the run; {text}")
        return self._finding("gradient norm", text if is_wrong else None)

    def _weights(self, recorded: tuple[Sums, Sums], again: tuple[Sums, Sums], lr: float) -> Finding:
        return self._of_tensor("weights", compare_weights(recorded, again, lr, self._limits.change))

    def _keep_weights(self) -> None:
        self._weights_before = [weight.detach().clone() for weight in self.policy.model.weights()]

    def _put_back(self) -> None:
        """Restore the weights before the update, which is possible because a difference ends the replay."""
        with torch.no_grad():
            for weight, before in zip(self.policy.model.weights(), self._weights_before, strict=True):
                weight.copy_(before)
