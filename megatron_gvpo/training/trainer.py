"""The training loop: Algorithm 1 of the GVPO paper, with the components that the method chooses."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from megatron_gvpo.algorithms.base import STEP_START, TEACHER, Reference
from megatron_gvpo.checks.preflight import preflight_on_ranks
from megatron_gvpo.core.collectives import all_gather_msgpack, all_ranks_agree, broadcast_msgpack
from megatron_gvpo.core.environment import is_first_process
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.core.signals import Interrupt
from megatron_gvpo.groups import Group
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.loss_pass import UpdateResult
from megatron_gvpo.observe.rollout_metrics import rollout_statistics, trained_tokens
from megatron_gvpo.observe.rollouts.table import Responses, TrainedRows
from megatron_gvpo.observe.step_records import StepRecord, UpdateRecord
from megatron_gvpo.runs.directory import RunDirectory
from megatron_gvpo.runs.existing_run import (
    earlier_of,
    exported_step,
    finished_message,
    lacks_summary,
    newest_step,
)
from megatron_gvpo.runs.hub import prepare_repository, upload_export
from megatron_gvpo.settings.advice import advice
from megatron_gvpo.settings.config import Config, as_config
from megatron_gvpo.training.checkpoints import Checkpoints
from megatron_gvpo.training.components import Components
from megatron_gvpo.training.session import SingleTrainer, naming_the_step, running
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from megatron_gvpo.megatron.policy import Policy

log = logging.getLogger(__name__)

Metrics = dict[str, float]


class Trainer:
    """Post-trains a policy. Every rank builds one with the same configuration and calls `fit`.

    `resume`: continue from the newest complete checkpoint in the output directory; with "auto", start a new
    run if there is none. `overwrite`: remove the files of an earlier run there. `allow_change`: the keys that
    change the mathematics and may differ from those of the run that is resumed. `checked`: the caller has
    called `preflight`, as the command line does before it loads torch. Raises ConfigError for settings that
    `preflight` refuses, before anything is loaded, such as an earlier run in the output directory and neither
    `resume` nor `overwrite`, nothing to resume, or changed settings; DataError for data that cannot be used;
    CheckpointError for a checkpoint that cannot be read.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        callbacks: Sequence[Callback] = (),
        *,
        resume: bool | Literal["auto"] = False,
        overwrite: bool = False,
        allow_change: Sequence[str] = (),
        checked: bool = False,
    ) -> None:
        begin = time.monotonic()
        earlier = earlier_of(resume, overwrite)
        config = as_config(config)
        if not checked:
            preflight_on_ranks(config, "train", earlier=earlier, allowed=allow_change)
        self.config = config
        self.callbacks = list(callbacks)
        self.is_main = is_first_process()
        self.interrupt = Interrupt()
        self._samples_from_policy = config.algorithm.samples_from_policy
        self._engine_reference = config.algorithm.reference_logprobs == "engine"
        self._single = SingleTrainer(self._release)
        # With "auto", a run that left no checkpoint starts again, at the present date.
        resumes = bool(resume) and newest_step(Path(config.output_dir)) is not None
        self.components = Components(config, resumes=resumes, heartbeat=self.interrupt.check)
        self.checkpoints = Checkpoints(self.components, partial(self.notify, "on_checkpoint"))
        resumed = self.checkpoints.resume() if resume else None
        self.directory = RunDirectory(config, earlier, allow_change)
        self.resumed = resumed is not None
        self.step, unreported = resumed or (0, {})
        self.reports_resumed_step = self.resumed and unreported is not None
        # The metrics of `step`, if this process has trained it, or its run could not report it.
        self._metrics: Metrics = unreported or {}
        # If false, on_step is still to be called for the step.
        self._is_reported = self.resumed and unreported is None
        self._record: StepRecord | None = None  # the present step's record
        self.is_mid_update = False  # the weights are no longer those of `step`
        self._stop_reason: str | None = None  # why a callback on this rank called `stop`
        self._loading_seconds = time.monotonic() - begin

    def fit(self) -> Metrics:
        """Train to the last step, or to a `stop`; returns its metrics, or none if the run had ended before.

        Raises Interrupted after SIGTERM, SIGUSR1, SIGINT or SIGHUP, and RolloutError when no server answers
        any more, a teacher or judge of the user's fails, or train.max_empty_batches batches in a row teach
        nothing, after a checkpoint. Raises UserFunctionError if a loss, estimator, member or prior of the
        user's fails, perhaps on this rank alone, RewardError for rewards that the estimator cannot take, and
        ImageError if an image is missing: after a checkpoint if all ranks fail before the step has changed
        the weights. Raises ConfigError when called again;
        HubError, on rank 0, where the finished run's export cannot be pushed.
        """
        steps, every = self.config.train.steps, self.config.checkpoint.every
        self._begun = time.monotonic() - self._loading_seconds
        with self._single.fit(lambda: self.step, steps):
            if self._was_finished_before():
                self._push_to_hub()
                return {}
            with running(self):
                self._report_start()
                for step in range(self.step + 1, self._last_step() + 1):
                    with naming_the_step(self, step):
                        self._train_step(step)
                    self._report()
                    if step == steps or (every > 0 and step % every == 0):
                        self.save()
                    reason = self._reason_to_stop()
                    if self.interrupt.check_and_agree(reason is not None) and step < steps:
                        self._stop_here(reason)
                        break
                self._finish()
            self._push_to_hub()
            return self._metrics

    def _train_step(self, step: int) -> None:
        """Algorithm 1: sample, score, freeze the references of the loss, update, push.

        With colocated servers the next step begins with the push, because the engine sleeps until then.
        """
        begin = time.perf_counter()
        self._begin_step(step)
        groups = self._sample()
        all_rows, metrics = self._mini_batches(groups)
        mini_batches = [trained for rows in all_rows if len(trained := rows.trained())]
        self._warn(*self.components.empty_batches.check(step, groups, mini_batches))
        mini_batches = self._freeze_references(mini_batches)
        self._record = self._new_record(step, all_rows)
        results = self._update_all(mini_batches, keep_weights=self.config.logging.rollouts.saves(step))
        self._notify_responses(step, groups, mini_batches, results)
        metrics |= self._update_metrics(step, results)
        self._complete_step(step, metrics, [result.update.skipped for result in results])
        self._push(step)
        metrics |= self._step_metrics(groups, time.perf_counter() - begin)

    # The parts of a step, in their order.

    def _begin_step(self, step: int) -> None:
        self.components.timer.take()
        self.components.profiler.step(step)

    def _sample(self) -> list[Group]:
        """Sample prompts and responses, and score them, until the batch policy has a batch."""
        components, interrupt = self.components, self.interrupt
        ahead = min(self.config.rollout.async_steps, self.config.train.steps - self.step - 1)
        while True:
            interrupt.check()
            if self._samples_from_policy:
                components.sync(self.step)
            components.batches.request(1 + ahead)
            groups = components.batches.next_batch(self.step + 1)
            if any(rollout.reward_errors for group in groups for rollout in group.rollouts):
                # A signal that ends the job ends the rewards' subprocesses, too: never train on such rewards.
                interrupt.check()
            groups, warnings = components.shape(groups, self.step + 1)
            self._warn(*warnings)
            if groups and (batch := components.batch_policy.offer(groups)) is not None:
                return self._readable_by_teacher(batch)
            self.checkpoints.mark()

    def _readable_by_teacher(self, groups: list[Group]) -> list[Group]:
        """The groups, where a teacher with another tokenizer can score each response that is trained."""
        text = self.components.text_teacher
        if text is None:
            return groups
        with self.components.timer.phase("scoring"):
            groups, warnings = text.begin(groups, self.step + 1)
        self._warn(*warnings)
        return groups

    def _mini_batches(self, groups: Sequence[Group]) -> tuple[list[TrainBatch], Metrics]:
        """Split the batch, in whole groups, into the rows of each mini-batch, and give them advantages."""
        algorithm = self.config.algorithm
        kind = algorithm.compares_rewards, algorithm.selects_right
        metrics = rollout_statistics(groups, self.step, *kind) if algorithm.has_rewards else {}
        metrics |= {f"batch/{name}": value for name, value in self.components.batch_policy.metrics.items()}
        count, estimator = self.config.train.mini_batches, self.components.estimator
        bounds = [len(groups) * i // count for i in range(count + 1)]
        first_rows = [0, *accumulate(len(group.rollouts) for group in groups)]
        turn_weight = self.config.rewards.turn_weight
        mini_batches = [
            TrainBatch.from_groups(groups[a:b], first_rows[a], turn_weight)
            for a, b in pairwise(bounds)
            if a < b
        ]
        if self.components.teacher is not None:
            self.components.teacher.ask([self._for_teacher(rows.trained()) for rows in mini_batches])
        if estimator is None:
            return mini_batches, metrics
        for i, rows in enumerate(mini_batches):
            mini_batches[i], statistics = estimator.fill(self._with_estimator_columns(rows))
            for name, value in statistics.items():
                key = f"advantage/{name}"
                metrics[key] = metrics.get(key, 0.0) + float(value) / len(mini_batches)
        return mini_batches, metrics

    def _with_estimator_columns(self, rows: TrainBatch) -> TrainBatch:
        """Add the columns that the estimator reads: the critic's values, log-probs of reference policies."""
        policy, estimator = self.components.policy, self.config.algorithm.estimator
        columns: dict[str, Tensor] = {}
        with self.components.timer.phase("scoring"):
            if policy.critic is not None:
                columns["value_r"] = policy.critic.values(rows)
            for column, reference in ({} if estimator is None else estimator.reference_policies).items():
                is_present = reference == STEP_START
                columns[f"{column}_logp_r"] = (
                    policy.score(rows) if is_present else self._reference_logp(reference, rows)
                )
        return rows.with_columns(**columns)

    def _freeze_references(self, mini_batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        with self.components.timer.phase("scoring"):
            return [self._with_references(rows, i == 0) for i, rows in enumerate(mini_batches)]

    def _with_references(self, rows: TrainBatch, first: bool) -> TrainBatch:
        """Log-probs of the policies that the loss compares with, before the step's first update.

        After an update the policy at step start no longer exists: compared with the updated policy, GVPO
        would silently be REINFORCE. The first mini-batch needs no scoring by the policy at step start, which
        is still the one in training.
        """
        references, policy = self.config.algorithm.loss.reference_policies, self.components.policy
        # These are the loss's columns, not the estimator's.
        columns: dict[str, Tensor | None] = {"old_logp_r": None, "ref_logp_r": None}
        present_r = None
        if not (first or self._engine_reference) and STEP_START in references.values():
            present_r = policy.score(rows) if rows.old_logp_r is None else rows.old_logp_r
            self.components.mismatch.compare(rows, present_r, self.step)
        for column, reference in references.items():
            is_present = reference == STEP_START
            columns[f"{column}_logp_r"] = present_r if is_present else self._reference_logp(reference, rows)
        return rows.with_columns(**columns)

    def _reference_logp(self, reference: Reference, rows: TrainBatch) -> Tensor:
        """Log-probs of a policy other than the one at step start, fp32 [r]."""
        policy, served = self.components.policy, self.components.teacher
        if reference != TEACHER:
            return policy.score_reference(rows)
        read, text = self._for_teacher(rows), self.components.text_teacher
        logp_r = policy.score_teacher(read) if served is None else served.score(read, self.interrupt.check)
        return logp_r if text is None else text.spread(rows, logp_r)

    def _for_teacher(self, rows: TrainBatch) -> TrainBatch:
        """The rows in the tokens that the teacher reads."""
        text = self.components.text_teacher
        return rows if text is None else text.rows(rows)

    def _new_record(self, step: int, mini_batches: Sequence[TrainBatch]) -> StepRecord | None:
        if not self.config.logging.steps.max_gb:
            return None
        return new_record(step, self.components.policy, mini_batches)

    def _update_all(self, mini_batches: list[TrainBatch], keep_weights: bool) -> list[UpdateResult]:
        """Update with every mini-batch, `train.batch_epochs` times, against the same reference policies.

        A second pass compares the first mini-batch, too, with the policy at step start: the forward of its
        first update gives those log-probs. Updates that are left out because nothing in them is trained still
        advance the learning rate. `keep_weights`: keep the loss's weights of tokens in the first pass.
        """
        results: list[UpdateResult] = []
        policy, references = self.components.policy, self.config.algorithm.loss.reference_policies
        at_start = [f"{column}_logp_r" for column, reference in references.items() if reference == STEP_START]
        with self.components.timer.phase("training"):
            for epoch in range(self.config.train.batch_epochs):
                for i, rows in enumerate(mini_batches):
                    results.append(result := self._update(rows, not results, keep_weights and epoch == 0))
                    self.is_mid_update = True
                    if len(results) == 1:
                        mini_batches[i] = rows.with_columns(**dict.fromkeys(at_start, result.logp_r))
            policy.skip_updates(self.config.train.updates_per_step - len(results))
            policy.end_step()
        return results

    def _update(self, rows: TrainBatch, first: bool, keep_weights: bool) -> UpdateResult:
        """One optimizer update; the first of a step also measures the mismatch of engine and trainer.

        With the engine's log-probs as the reference, that mismatch corrects the later updates. The first one
        needs no reference: the policy at step start is the one that trains, so d = 0 exactly. Where older
        weights sampled, the reference is the policy that sampled, in the first update as well.
        """
        if self._engine_reference and not (first and rows.sampled_by(self.step).all()):
            rows = rows.with_columns(ref_logp_r=self.components.mismatch.corrected(rows))
        again = self.config.train.batch_epochs > 1
        keep_logp = first and (again or rows.engine_logp_r is not None)
        is_recorded = self._record is not None
        result = self.components.policy.update(
            rows,
            at_step_start=first,
            keep_logp=keep_logp,
            keep_weights=keep_weights or is_recorded,
            keep_gradients=is_recorded,
        )
        if self._record is not None:
            add_update(self._record, self.components.policy, rows, result)
        if (critic := self.components.policy.critic) is not None:
            result = replace(result, metrics=result.metrics | critic.update(rows))
        if first and result.logp_r is not None:
            self.components.mismatch.compare(rows, result.logp_r, self.step)
        return result

    def _notify_responses(
        self,
        step: int,
        groups: list[Group],
        mini_batches: Sequence[TrainBatch],
        results: Sequence[UpdateResult],
    ) -> None:
        if self.config.logging.rollouts.saves(step):
            pairs = zip(mini_batches, results, strict=False)
            trained = [self._trained_rows(rows, result) for rows, result in pairs]
            self.notify("on_responses", Responses("train", step, groups, trained))
        if self._record is not None:
            self.notify("on_record", self._record, groups)

    def _trained_rows(self, rows: TrainBatch, result: UpdateResult) -> TrainedRows:
        """The rows of an update in the first pass, with log-probs (at step start, if known) and weights."""
        references = self.config.algorithm.loss.reference_policies.items()
        at_start = [f"{column}_logp_r" for column, policy in references if policy == STEP_START]
        known = [logp_r for name in at_start if (logp_r := getattr(rows, name)) is not None]
        logp_r = result.logp_r if self._engine_reference or not known else known[0]
        return TrainedRows(rows, logp_r, result.weight_r)

    def _update_metrics(self, step: int, results: Sequence[UpdateResult]) -> Metrics:
        """Means over the step's updates, its learning rate, and the mismatch of engine and trainer."""
        metrics: Metrics = self.components.mismatch.take()
        self._warn(self.components.mismatch.warning(step, metrics))
        for result in results:
            values = {f"train/{name}": value for name, value in result.metrics.items()} | result.head
            for name, value in values.items():
                metrics[name] = metrics.get(name, 0.0) + value / len(results)
        if results:  # there are none if every response was masked
            metrics["train/grad_norm"] = sum(r.update.grad_norm for r in results) / len(results)
            metrics["train/lr"] = results[-1].update.lr
            metrics |= results[0].memory
        metrics["train/skipped"] = float(sum(r.update.skipped for r in results))
        return metrics

    def _complete_step(self, step: int, metrics: Metrics, are_skipped: Sequence[bool]) -> None:
        """Count the step as trained from here on, even if a later push fails, and its skipped updates."""
        self.step, self.is_mid_update = step, False
        self._metrics, self._is_reported = metrics, False
        try:
            self._warn(*self.components.empty_batches.check_updates(step, are_skipped))
        finally:
            self.checkpoints.mark()

    def _push(self, step: int) -> None:
        if self._samples_from_policy and not self.components.engine.shares_gpus:  # else `_sample` pushes
            self.components.sync(step)

    def _step_metrics(self, groups: Sequence[Group], seconds: float) -> Metrics:
        """Metrics of the engine and the teacher, and times."""
        phases, teacher = self.components.timer.take(), self.components.teacher
        metrics = dict(self.components.rollout_metrics)
        if teacher is not None:
            metrics |= teacher.metrics
        if self.components.text_teacher is not None:
            metrics |= self.components.text_teacher.metrics
        metrics |= {f"time/{name}": value for name, value in phases.items()} | {"time/step": seconds}
        metrics["throughput/tokens_per_s"] = trained_tokens(groups) / seconds
        return metrics

    # Before the first step, between steps, and after the last one.

    def begin(self) -> None:
        """Claim the output directory, and finish the exports of an earlier run.

        The input was checked before.
        """
        settings = self.config.checkpoint.push_to_hub
        with all_ranks_agree(ConfigError):
            if settings is not None and self.is_main:
                prepare_repository(settings)
        self.directory.begin(self.step, self.resumed, self.checkpoints.run)
        if self.resumed:
            self.checkpoints.complete_exports(self.step)

    def _was_finished_before(self) -> bool:
        if self._was_stopped_early():
            return True
        if self.step < self.config.train.steps:
            return False
        message = broadcast_msgpack(finished_message(self.config))
        if message is not None and self.is_main:
            log.warning(message)
        return message is not None

    def _was_stopped_early(self) -> bool:
        """True, with a warning, if the resumed run had ended because its metric no longer improved."""
        out, checkpoint = Path(self.config.output_dir), self.config.checkpoint
        is_settled = self.resumed and self._is_reported and self.step < self.config.train.steps
        reason = self._reason_to_stop_early() if is_settled else None
        lacks_export = checkpoint.export_hf and exported_step(out / "hf") != self.step
        if reason is not None and (lacks_export or lacks_summary(out, self.step)):
            reason = None  # the run ended before its export or its summary: `fit` writes them
        reason = broadcast_msgpack(reason)
        self._warn(
            f"output_dir={out}: this run has stopped early, after step {self.step} of "
            f"{self.config.train.steps}: {reason}. To train on, give more patience, or leave "
            "train.stop_early out"
            if reason is not None
            else None
        )
        return reason is not None

    def _last_step(self) -> int:
        """The step with which the run ends, unless it stops: the present one if it has stopped early."""
        reason = self._reason_to_stop_early() if self.resumed else None
        return self.config.train.steps if broadcast_msgpack(reason) is None else self.step

    def _report_start(self) -> None:
        """Report the policy before the first step, or the step that the resumed run could not report."""
        self._warn(advice(self.config))
        if not self._is_reported:
            self._report()
            if self.resumed:
                self.save()  # after the evaluation, by which the checkpoint may be the best

    def _report(self) -> None:
        """Evaluate if due, and report the step to the callbacks.

        A resumed run reports the step that the earlier run did not report.
        """
        every = self.config.eval.every
        if self.step in (0, self.config.train.steps) or (every and self.step % every == 0):
            self.interrupt.check()
            self._metrics |= self.evaluate()
        self._is_reported = True
        self.checkpoints.early_stop.offer(self.step, self._metrics)
        self.notify("on_step", self.step, self._metrics)

    def save(self) -> None:
        """Write, or begin to write, a checkpoint; a run that resumes from it continues as this run does."""
        self.checkpoints.save(self.step, self._metrics, self._is_reported)

    def evaluate(self) -> Metrics:
        """Metrics of the present policy on the held-out prompts; empty without any."""
        groups, metrics = self.components.evaluate(self.step)
        if any(rollout.reward_errors for group in groups for rollout in group.rollouts):
            self.interrupt.check()  # the errors may come from a signal that ends the job, as in `_sample`
        if groups and self.config.logging.rollouts.every:
            self.notify("on_responses", Responses("eval", self.step, groups))
        return metrics

    def stop(self, reason: str) -> None:
        """End the run after the present step with a checkpoint and an export, as after the last one.

        A callback calls it, on one rank or on all. `fit` returns as usual; the run can be resumed.
        """
        self._stop_reason = reason

    def _reason_to_stop(self) -> str | None:
        """Why this rank ends the run before its last step; None if it continues."""
        if (reason := self._reason_to_stop_early()) is not None:
            return reason
        hours = self.config.train.max_hours
        if self._stop_reason is None and hours is not None and time.monotonic() - self._begun >= 3600 * hours:
            return f"train.max_hours={hours:g} have passed"
        return self._stop_reason

    def _reason_to_stop_early(self) -> str | None:
        """Why `train.stop_early` ends the run; None if it continues, and on ranks other than the first."""
        reason, best = self.checkpoints.early_stop.reason, self.checkpoints.best_step
        if reason is None or not self.is_main:
            return None
        return reason + ("" if best is None else f"; the best checkpoint is of step {best}")

    def _stop_here(self, reason: str | None) -> None:
        """Save the step, and report why the run ends with it. A collective."""
        self.save()
        why = next(text for text in all_gather_msgpack(reason) if text is not None)
        self._warn(f"stopped after step {self.step} of {self.config.train.steps}: {why}; --resume goes on")

    def _finish(self) -> None:
        self.checkpoints.finish()
        self._warn(self.checkpoints.without_best())
        if self.config.checkpoint.export_hf:
            self.checkpoints.export(Path(self.config.output_dir) / "hf", self.step)
        self.notify("on_end")

    def _push_to_hub(self) -> None:
        """Push the export, unless an earlier start of the run has pushed it."""
        if self.is_main:  # other ranks do not wait, because it may take long
            upload_export(self.config.checkpoint, Path(self.config.output_dir))

    def close(self) -> None:
        """Free the model's memory and its process groups, as the construction of another Trainer does."""
        self._single.end()

    def _release(self) -> None:
        vars(self).pop("components", None)
        vars(self).pop("checkpoints", None)
        parallel.release()

    # Messages.

    def notify(self, event: str, *args: Any) -> None:
        """Call every callback's method of this name."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def _warn(self, *warnings: str | None) -> None:
        """Write the warnings that are not None, on one rank."""
        for warning in warnings:
            if warning is not None and self.is_main:
                log.warning(hide(warning))


class Callback:
    """Base class of callbacks: override the methods that you need.

    The trainer calls them on every rank; `trainer.is_main` is True on the one rank that should print.
    `trainer.stop(reason)` ends the run after the present step, with a checkpoint and an export.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called before the first step."""

    def on_step(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Called after every step, and with step 0 after the evaluation that precedes the first step."""

    def on_responses(self, trainer: Trainer, responses: Responses) -> None:
        """Called with the responses of a step, or of an evaluation, if logging.rollouts saves them.

        `on_step` follows. Change nothing in them.
        """

    def on_record(self, trainer: Trainer, record: StepRecord, groups: Sequence[Group]) -> None:
        """Called with the record of a step and its groups, if logging.steps keeps it; `on_step` follows."""

    def on_checkpoint(self, trainer: Trainer, directory: Path) -> None:
        """Called when the checkpoint in `directory` is complete."""

    def on_end(self, trainer: Trainer) -> None:
        """Called after the last step, its checkpoint and export; not called after an interruption."""

    def on_exit(self, trainer: Trainer) -> None:
        """Called last, for whatever reason the run ends. Close here what `on_start` opened."""


def new_record(step: int, policy: Policy, mini_batches: Sequence[TrainBatch]) -> StepRecord:
    """The record of a step before its first update. A collective."""
    has_images = any(images for rows in mini_batches for images in rows.images or ())
    return StepRecord(
        step, policy.data_parallel_ranks, has_images, policy.tensor_sums.take("weights"), list(mini_batches)
    )


def add_update(record: StepRecord, policy: Policy, rows: TrainBatch, result: UpdateResult) -> None:
    """Add the update that the policy has just made on `rows` to the record of its step. A collective."""
    assert rows.place_n is not None, "the trainer numbers the rows of a step"
    record.updates.append(
        UpdateRecord(
            place_n=rows.place_n,
            old_logp_r=rows.old_logp_r,
            ref_logp_r=rows.ref_logp_r,
            logp_r=result.logp_r,
            weight_r=result.weight_r,
            metrics={name: float(value) for name, value in result.metrics.items()},
            grad_norm=result.update.grad_norm,
            lr=result.update.lr,
            is_skipped=result.update.skipped,
            gradients=result.gradients,
            weights=policy.tensor_sums.take("weights"),
        )
    )
