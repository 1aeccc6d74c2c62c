"""The training loop: Algorithm 1 of the GVPO paper, with the components that the method chooses."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from megatron_gvpo.algorithms.base import STEP_START, TEACHER, Reference
from megatron_gvpo.checks.preflight_on_ranks import preflight_on_ranks
from megatron_gvpo.core.collectives import all_have_failed, broadcast_msgpack, first_problem
from megatron_gvpo.core.errors import CheckpointError, ConfigError, RolloutError
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.core.signals import Interrupt, Interrupted
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.data.image_files import ImageError
from megatron_gvpo.groups import Group
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.policy import UpdateResult
from megatron_gvpo.observe.rollout_metrics import rollout_statistics, trained_tokens
from megatron_gvpo.observe.rollouts.table import Responses, TrainedRows
from megatron_gvpo.runs.directory import RunDirectory
from megatron_gvpo.runs.existing_run import earlier_of, finished
from megatron_gvpo.runs.hub import prepare_repository, upload_export
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.load import as_config
from megatron_gvpo.settings.rules import advice
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.components import Components
from megatron_gvpo.training.single_trainer import Turn
from megatron_gvpo.types import OnWait, TrainBatch

log = logging.getLogger(__name__)

Metrics = dict[str, float]
FAILING = 10.0  # seconds between the first and the last rank that a user's function fails on


class Trainer:
    """Post-trains a policy. Every rank builds one with the same configuration and calls `fit`.

    `resume`: continue from the newest complete checkpoint in the output directory; with "auto", start anew
    if there is none. `overwrite`: remove what an earlier run left there. `allow_change`: the keys that
    change the mathematics and may differ from those of the run that is resumed. `checked`: the caller has
    called `preflight`, as the command line does before it loads torch. Raises ConfigError for what
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
        earlier = earlier_of(resume, overwrite)
        config = as_config(config)
        if not checked:
            preflight_on_ranks(config, "train", earlier=earlier, allowed=allow_change)
        self.config = config
        self.callbacks = list(callbacks)
        self._samples_from_policy = config.algorithm.samples_from_policy
        self._engine_reference = config.algorithm.reference_logprobs == "engine"
        self.is_main = int(os.environ.get("RANK", "0")) == 0
        self._turn = Turn(self._release)
        self.components = Components(config, resumes=bool(resume))
        found = self.components.resume() if resume else None
        self._directory = RunDirectory(config, earlier, allow_change)
        self.resumed = found is not None
        self.step = found or 0
        # The metrics of `step`, if this process has trained it, or its run could not report it.
        self._metrics: Metrics = self.components.unreported or {}
        self._unreported = not self.resumed or self.components.unreported is not None  # on_step is due
        self._saving: Path | None = None  # a checkpoint that may not be complete yet
        self._saved: Path | None = None  # the last complete one
        self._saved_step = self.step  # of the last one, which a resumed run has read
        self._updated = False  # the weights are no longer those of `step`
        self._resume_point: dict[str, Any] = self.components.state_dict()

    def fit(self) -> Metrics:
        """Train to the last step; returns that step's metrics, or none if the run was finished before.

        Raises Interrupted after SIGTERM, SIGUSR1, SIGINT or SIGHUP, and RolloutError when no server answers
        any more, a teacher or judge of the user's fails, or train.max_empty_batches batches in a row teach
        nothing, after a checkpoint. Raises UserFunctionError if a loss, estimator, member or prior of the
        user's fails, perhaps on this rank alone, and ImageError if an image is gone: after a checkpoint if
        all ranks fail before the step has changed the weights. Raises ConfigError when called again;
        HubError, on rank 0, where the finished run's export cannot be pushed.
        """
        with self._turn.fit(lambda: self.step, self.config.train.steps):
            metrics = self._fit()
            if metrics is not None and self.is_main:  # the other ranks do not wait: it may take long
                upload_export(self.config.checkpoint, Path(self.config.output_dir), self.step)
            return metrics or {}

    def close(self) -> None:
        """Free the model's memory and its process groups, as the construction of another Trainer does."""
        self._turn.end()

    def _release(self) -> None:
        vars(self).pop("components", None)
        parallel.release()

    def _fit(self) -> Metrics | None:
        """Train to the last step; returns that step's metrics, or None if the run was finished before."""
        steps, every = self.config.train.steps, self.config.checkpoint.every
        if self.step >= steps and (said := broadcast_msgpack(finished(self.config))) is not None:
            if self.is_main:
                log.warning(said)
            return None
        with Interrupt() as interrupt, self._directory.alone(), self.components, ExitStack() as end:
            self._prepare_hub()
            self._directory.begin(self.step, self.resumed)  # only now, because the input is known to be right
            if self.resumed:
                self.components.complete_exports(self.step)
            end.callback(self._notify, "on_exit")
            self._notify("on_start")
            self._warn([said] if (said := advice(self.config)) else [])
            try:
                if self._unreported:
                    self._report(interrupt)
                    if self.resumed:
                        self.save()  # with the evaluation, by which it may be the best
                for step in range(self.step + 1, steps + 1):
                    try:
                        self._train_step(step, interrupt)
                    except (UserFunctionError, ImageError) as error:
                        raise type(error)(f"step {step}: {error}; {self._kept()}") from error
                    self._report(interrupt)
                    if step == steps or (every and step % every == 0):
                        self.save()
                    interrupt.check()
            except (Interrupted, RolloutError) as stop:  # every rank raises them at the same point
                self.save()
                self._finish_saving()
                if isinstance(stop, Interrupted):
                    raise Interrupted(f"the checkpoint is complete ({self._saved})") from None
                raise
            self._finish_saving()
            if self.config.checkpoint.export_hf:
                self.components.export_hf(Path(self.config.output_dir) / "hf", self.step)
            self._notify("on_end")
        return self._metrics

    def _prepare_hub(self) -> None:
        """Raise ConfigError on all ranks if rank 0 cannot push what the run will export."""
        settings, problem = self.config.checkpoint.push_to_hub, None
        try:
            if settings is not None and self.is_main:
                prepare_repository(settings)
        except ConfigError as error:
            problem = str(error)
        if (said := first_problem(problem)) is not None:
            raise ConfigError(said)

    def _train_step(self, step: int, interrupt: Interrupt) -> None:
        """Sample from the policy at step start, freeze what the loss compares with, update, push."""
        components, timer, begin = self.components, self.components.timer, time.perf_counter()
        timer.take()
        components.profiler.step(step)
        groups = self._draw_groups(interrupt)
        mini_batches, metrics = self._mini_batches(groups, interrupt.check)
        self._warn(components.empty_batches.check(self.step + 1, groups, mini_batches))
        with timer.phase("scoring"):
            mini_batches = [
                self._freeze_references(rows, i == 0, interrupt.check) for i, rows in enumerate(mini_batches)
            ]
        with timer.phase("training"):
            results = self._updates(mini_batches, saved := self.config.logging.rollouts.saves(step))
            components.policy.end_step()
        if saved:
            trained = [self._trained(rows, r) for rows, r in zip(mini_batches, results, strict=False)]
            self._notify("on_responses", Responses("train", step, groups, trained))
        metrics |= (mismatch := self.components.mismatch.take())
        self._warn([said] if (said := components.mismatch.warning(step, mismatch)) else [])
        for result in results:
            found = {f"train/{name}": value for name, value in result.metrics.items()} | result.head
            for name, value in found.items():
                metrics[name] = metrics.get(name, 0.0) + value / len(results)
        if results:  # unless every response was masked
            metrics["train/grad_norm"] = sum(r.update.grad_norm for r in results) / len(results)
            metrics["train/lr"] = results[-1].update.lr
            metrics |= results[0].memory
        metrics["train/skipped"] = float(sum(r.update.skipped for r in results))
        self.step, self._resume_point, self._updated = step, components.state_dict(), False
        self._metrics, self._unreported = metrics, True  # the engine may fail from here on
        if self._samples_from_policy and not components.engine.shares_gpus:  # else _draw_groups pushes
            components.sync(step)
        seconds, phases = time.perf_counter() - begin, timer.take()
        metrics |= components.rollout_metrics
        if components.teacher is not None:
            metrics |= components.teacher.metrics
        metrics |= {f"time/{name}": value for name, value in phases.items()} | {"time/step": seconds}
        metrics["throughput/tokens_per_s"] = trained_tokens(groups) / seconds

    def _report(self, interrupt: Interrupt) -> None:
        """Evaluate, if it is time to, and tell the callbacks of the step. A resumed run makes up for it."""
        every = self.config.eval.every
        if self.step in (0, self.config.train.steps) or (every and self.step % every == 0):
            interrupt.check()
            self._metrics |= self.evaluate(interrupt.check)
        self._unreported = False
        self._notify("on_step", self.step, self._metrics)

    def _draw_groups(self, interrupt: Interrupt) -> list[Group]:
        """Sample prompts and responses until the batch policy has a batch."""
        components = self.components
        ahead = min(self.config.rollout.async_steps, self.config.train.steps - self.step - 1)
        while True:
            interrupt.check()
            if self._samples_from_policy:
                components.sync(self.step)
            components.batches.ask(1 + ahead)
            groups = components.batches.collect(self.step + 1, on_wait=interrupt.check)
            if any(rollout.reward_errors for group in groups for rollout in group.rollouts):
                # A signal that ends the job ends the rewards' subprocesses, too: never train on such rewards.
                interrupt.check()
            groups, warnings = components.shape(groups, self.step + 1)
            self._warn(warnings)
            if groups and (batch := components.batch_policy.offer(groups)) is not None:
                return batch
            self._resume_point = components.state_dict()

    def _mini_batches(self, groups: Sequence[Group], on_wait: OnWait) -> tuple[list[TrainBatch], Metrics]:
        """Split whole groups into the rows of each optimizer update, and give them advantages."""
        metrics = rollout_statistics(groups, self.step) if self.config.algorithm.has_rewards else {}
        metrics |= {f"batch/{name}": value for name, value in self.components.batch_policy.metrics.items()}
        count, estimator = self.config.train.mini_batches, self.components.estimator
        bounds = [len(groups) * i // count for i in range(count + 1)]
        places = [0, *accumulate(len(group.rollouts) for group in groups)]
        paid = self.config.rewards.turn_weight
        mini_batches = [
            TrainBatch.from_groups(groups[a:b], places[a], paid) for a, b in pairwise(bounds) if a < b
        ]
        if self.components.teacher is not None:
            self.components.teacher.ask([rows.trained() for rows in mini_batches])
        if estimator is not None:
            for i, rows in enumerate(mini_batches):
                mini_batches[i], statistics = estimator.fill(self._judged(rows, on_wait))
                for name, value in statistics.items():
                    key = f"advantage/{name}"
                    metrics[key] = metrics.get(key, 0.0) + float(value) / len(mini_batches)
        trained = [rows.trained() for rows in mini_batches]
        return [rows for rows in trained if len(rows)], metrics

    def _judged(self, rows: TrainBatch, on_wait: OnWait) -> TrainBatch:
        """Add the columns that the estimator reads: the critic's values, log-probs of reference policies."""
        policy, estimator = self.components.policy, self.config.algorithm.estimator
        columns: dict[str, Tensor] = {}
        with self.components.timer.phase("scoring"):
            if policy.critic is not None:
                columns["value_r"] = policy.critic.values(rows)
            for column, reference in ({} if estimator is None else estimator.reference_policies).items():
                now = reference == STEP_START
                columns[f"{column}_logp_r"] = (
                    policy.score(rows) if now else self._reference_logp(reference, rows, on_wait)
                )
        return rows.with_columns(**columns)

    def _reference_logp(self, reference: Reference, rows: TrainBatch, on_wait: OnWait) -> Tensor:
        """Log-probs of a policy other than the one at step start, fp32 [r]."""
        policy, served = self.components.policy, self.components.teacher
        if reference != TEACHER:
            return policy.score_reference(rows)
        return policy.score_teacher(rows) if served is None else served.score(rows, on_wait)

    def _freeze_references(self, rows: TrainBatch, first: bool, on_wait: OnWait) -> TrainBatch:
        """Log-probs of the policies that the loss compares with, before the step's first update.

        After an update the policy at step start is gone: compared with the updated one, GVPO would silently
        be REINFORCE. The first mini-batch needs no scoring by that policy: it is still the one that trains.
        """
        references, policy = self.config.algorithm.loss.reference_policies, self.components.policy
        columns: dict[str, Tensor | None] = {"old_logp_r": None, "ref_logp_r": None}  # not the estimator's
        now_r = None
        if not (first or self._engine_reference) and STEP_START in references.values():
            now_r = policy.score(rows) if rows.old_logp_r is None else rows.old_logp_r
            self.components.mismatch.compare(rows, now_r, self.step)
        for column, reference in references.items():
            now = reference == STEP_START
            columns[f"{column}_logp_r"] = now_r if now else self._reference_logp(reference, rows, on_wait)
        return rows.with_columns(**columns)

    def _updates(self, mini_batches: list[TrainBatch], saved: bool) -> list[UpdateResult]:
        """Update with every mini-batch, `train.batch_epochs` times, against the same reference policies.

        In a second pass the first one needs log-probs of the policy at step start, too: its first forward has
        them. Those with nothing left to train use up their learning rates. `saved`: keep weights of tokens.
        """
        results: list[UpdateResult] = []
        for epoch in range(self.config.train.batch_epochs):
            for i, rows in enumerate(mini_batches):
                keep_weights = saved and epoch == 0
                results.append(result := self._update(rows, not results, keep_weights))
                self._updated = True
                if len(results) == 1:
                    references = self.config.algorithm.loss.reference_policies.items()
                    at_start = [f"{column}_logp_r" for column, policy in references if policy == STEP_START]
                    mini_batches[i] = rows.with_columns(**dict.fromkeys(at_start, result.logp_r))
        planned = self.config.train.mini_batches * self.config.train.batch_epochs
        self.components.policy.skip_updates(planned - len(results))
        return results

    def _trained(self, rows: TrainBatch, result: UpdateResult) -> TrainedRows:
        """The trainer's numbers of an update of the first pass; log-probs at step start where it has them."""
        references = self.config.algorithm.loss.reference_policies.items()
        at_start = [f"{column}_logp_r" for column, policy in references if policy == STEP_START]
        known = [logp_r for name in at_start if (logp_r := getattr(rows, name)) is not None]
        logp_r = result.logp_r if self._engine_reference or not known else known[0]
        return TrainedRows(rows, logp_r, result.weight_r)

    def _update(self, rows: TrainBatch, first: bool, keep_weights: bool) -> UpdateResult:
        """One optimizer update; the first of a step also measures the mismatch of engine and trainer.

        With the engine's log-probs as the reference, that mismatch corrects the later updates. The first one
        needs no reference: the policy at step start is the one that trains, so d = 0 exactly. Where older
        weights sampled, the reference is the policy that sampled, in the first update as well.
        """
        if self._engine_reference and not (first and rows.sampled_by(self.step).all()):
            rows = rows.with_columns(ref_logp_r=self.components.mismatch.corrected(rows))
        again = self.config.train.batch_epochs > 1
        kept = first and (again or rows.engine_logp_r is not None)
        result = self.components.policy.update(
            rows, at_step_start=first, keep_logp=kept, keep_weights=keep_weights
        )
        if (critic := self.components.policy.critic) is not None:
            result = replace(result, metrics=result.metrics | critic.update(rows))
        if first and result.logp_r is not None:
            self.components.mismatch.compare(rows, result.logp_r, self.step)
        return result

    def evaluate(self, on_wait: OnWait = None) -> Metrics:
        """Metrics of the present policy on the held-out prompts; empty without any."""
        groups, metrics = self.components.evaluate(self.step, on_wait)
        if on_wait is not None and any(r.reward_errors for group in groups for r in group.rollouts):
            on_wait()  # as in `_draw_groups`
        if groups and self.config.logging.rollouts.every:
            self._notify("on_responses", Responses("eval", self.step, groups))
        return metrics

    def save(self) -> None:
        """Write, or begin to write, a checkpoint; a run resumed from it does what this one does next."""
        self._finish_saving()
        state = self._resume_point | ({"unreported": self._metrics} if self._unreported else {})
        self._saving = self.components.save(self.step, state, self._metrics if self.step else {})
        self._saved_step = self.step
        if not self.config.checkpoint.asynchronous:
            self._finish_saving()

    def _finish_saving(self) -> None:
        if self._saving is not None:
            self.components.finish_saving()
            self._saved, self._saving = self._saving, None
            self._notify("on_checkpoint", self._saved)

    def _kept(self) -> str:
        """Save the step before the one that failed, where all ranks know of it; says where `--resume` begins.

        A step that failed after an update of the weights leaves nothing to save.
        """
        if self._saved_step < self.step and not self._updated and all_have_failed(FAILING):
            try:
                self.save()
                self._finish_saving()
            except CheckpointError as error:
                return f"and no checkpoint could be saved: {error}"
        if not self._saved_step:
            return "no checkpoint has been saved yet (checkpoint.every)"
        return f"`train ... --resume` continues from step {self._saved_step}"

    def _warn(self, warnings: Sequence[str]) -> None:
        for said in warnings if self.is_main else ():
            log.warning(hide(said))

    def _notify(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)
