"""The checkpoints and exports of a run: writes them when due, tracks the best, and resumes from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.core.errors import CheckpointError, DataError
from megatron_gvpo.megatron.checkpoint.load import load_newest, load_policy
from megatron_gvpo.megatron.checkpoint.save import save_policy
from megatron_gvpo.runs.existing_run import best_of_lost_step, exported_step
from megatron_gvpo.runs.record import Best, EarlyStop, measured_otherwise, measurement
from megatron_gvpo.runs.settings_diff import Change, listed
from megatron_gvpo.runs.written import step_name
from megatron_gvpo.training.conversion import write_hugging_face
from megatron_gvpo.training.run_state import RunState

if TYPE_CHECKING:
    from megatron_gvpo.training.components import Components

log = logging.getLogger(__name__)

Metrics = dict[str, float]


class Checkpoints:
    """Writes the checkpoints of a run and the exports that go with them. Every method is a collective.

    `on_complete` is called with the directory of each checkpoint once it is complete.
    """

    def __init__(self, components: Components, on_complete: Callable[[Path], None]) -> None:
        self._components, self._on_complete = components, on_complete
        self._options = components.config.checkpoint
        self._out = Path(components.config.output_dir)
        self._state = RunState(components)
        self._best = Best(self._options.keep_best)
        self.early_stop = EarlyStop(components.config.train.stop_early, self._options.keep_best)
        # Rank 0 decides, because ranks may not see the same files.
        self._measurement = broadcast_msgpack(measurement(components.config) if dist.get_rank() == 0 else {})
        self._pending: Path | None = None  # a checkpoint that may not be complete yet
        self.last: Path | None = None  # the last complete checkpoint, written or resumed from
        self.last_step = 0  # the step of the last checkpoint
        self.run: str | None = None  # the id of the run whose checkpoint was loaded
        # The state at a step's end, from which a run continues: a step that fails half-way is trained again
        # from here.
        self._resume_point: dict[str, Any] = {}
        self._marks = 0  # the number of states that were recorded
        self._saved: tuple[int, bool] | None = None  # that of the last checkpoint's, and its `is_reported`
        self.mark()

    def mark(self) -> None:
        """Record the present state of samplers and blocks for the next checkpoint."""
        self._resume_point = self._state.state_dict()
        self._marks += 1

    def resume(self) -> tuple[int, Metrics | None] | None:
        """Restore the newest checkpoint that is not damaged. Raises CheckpointError, DataError.

        Returns its step, and the step's metrics if its run could not report them; None without a checkpoint.
        """

        def load(directory: Path) -> dict[str, Any]:
            self.last = directory
            return load_policy(directory, self._components.policy)

        directory = self._out / "checkpoints"
        state = load_newest(directory, load, put_aside=True)
        if state is None:
            return None
        try:
            self._state.load_state_dict(state)
            self._load_best(state)
        except DataError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{directory}: state.json of step {state['step']} is damaged: {type(error).__name__}: {error}"
            ) from None
        self.last_step, self.run = int(state["step"]), state.get("run")
        # The number of updates in the checkpoint is not used: its run may have made others in a step.
        updates_per_step = self._components.config.train.updates_per_step
        self._components.policy.follow_schedule(self.last_step * updates_per_step)
        self.mark()
        self._saved = self._marks, "unreported" not in state
        return self.last_step, state.get("unreported")

    def _load_best(self, state: dict[str, Any]) -> None:
        """Restore the best value so far, unless the metric is now measured otherwise."""
        best, before, changed = self._options.keep_best, state.get("measurement"), list[Change]()
        if best is not None and before:  # earlier versions did not write it
            files = self._measurement["files"]
            changed = measured_otherwise(best.metric, before, self._components.config, files)
        if not changed:
            self._best.load_state_dict(state.get("best", {}))
            self.early_stop.load_state_dict(state.get("early_stop", {}))
        elif state.get("best") and dist.get_rank() == 0:
            log.warning(
                "checkpoint.keep_best: the values of %s up to here were measured otherwise, and count no "
                "more (%s): the next checkpoint that has it is the best, and replaces step %d and hf_best; "
                "copy what you need",
                state["best"]["by"]["metric"],
                listed(changed),
                state["best"]["step"],
            )

    def save(self, step: int, metrics: Metrics, is_reported: bool) -> None:
        """Write, or begin to write, a checkpoint, from which a resumed run continues exactly as this run.

        Nothing is written if the last checkpoint has this state: a signal leaves no time to write it again.
        `metrics` of the step decide whether its checkpoint is the best. The checkpoint keeps them: as
        `reported`, by which metrics.jsonl is known to be of the same run, or without `is_reported` as
        `unreported`, so that the resumed run reports the step.
        """
        self.finish()
        if self._saved == (self._marks, is_reported):
            return
        # Ranks may differ in metrics such as times and memory: rank 0 decides.
        is_best = broadcast_msgpack(self._best.offer(step, metrics if step else {}))
        state = self._resume_point | {"reported" if is_reported else "unreported": metrics}
        state |= {"best": self._best.state_dict(), "early_stop": self.early_stop.state_dict()}
        state |= {"measurement": self._measurement}
        with self._components.timer.phase("checkpoint"):
            self._pending = save_policy(
                self._out / "checkpoints",
                step,
                self._components.policy,
                state,
                keep=self._options.keep,
                asynchronous=self._options.asynchronous,
                best=self._best.step,
            )
        self.last_step, self._saved = step, (self._marks, is_reported)
        self._export_all(self._directories(step, is_best), step)
        if not self._options.asynchronous:
            self.finish()

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint that `checkpoint.keep_best` keeps."""
        return self._best.step

    def without_best(self) -> str | None:
        """A warning if `checkpoint.keep_best` has kept none; None if it has, or is not set."""
        best = self._options.keep_best
        if best is None or self._best.step is not None:
            return None
        return (
            f"checkpoint.keep_best.metric={best.metric}: no step that has a checkpoint had this metric, so "
            f"no checkpoint is the best, and {self._out / 'hf_best'} was not written"
        )

    def finish(self) -> None:
        """Wait for a checkpoint that is still being written. Raises CheckpointError if writing fails."""
        if self._pending is not None:
            self._wait()
            self.last, self._pending = self._pending, None
            self._on_complete(self.last)

    def settle(self) -> None:
        """Wait like `finish`, but on a single rank that fails: without collectives and callbacks."""
        if self._pending is not None:
            self._wait()

    def _wait(self) -> None:
        with self._components.timer.phase("checkpoint"):
            for model in self._components.policy.models:
                model.finish_background_work()

    def complete_exports(self, step: int) -> None:
        """Write the exports that the run of the resumed checkpoint, of `step`, has not written."""
        exports = self._directories(step, self._best.step == step)
        missing = broadcast_msgpack([i for i, path in enumerate(exports) if exported_step(path) != step])
        self._export_all([exports[i] for i in missing], step)
        warning = best_of_lost_step(self._out, step, self._best.step)
        if self._options.keep_best is not None and warning is not None and dist.get_rank() == 0:
            log.warning(warning)

    def export(self, directory: Path, step: int) -> None:
        """Write a Hugging Face checkpoint of `step`: weights, configuration, tokenizer.

        Raises CheckpointError, and leaves `directory` as it was.
        """
        with self._components.timer.phase("checkpoint"):
            write_hugging_face(self._components.policy.model, self._components.config.model, directory, step)

    def _directories(self, step: int, is_best: bool) -> list[Path]:
        """The Hugging Face directories that go with the checkpoint of `step`."""
        best = [self._out / "hf_best"] if is_best else []
        regular = [self._out / "exports" / step_name(step)] if self._options.exports(step) else []
        return best + regular

    def _export_all(self, directories: Sequence[Path], step: int) -> None:
        if directories:
            self._wait()  # first, so that every exported step has its checkpoint
        for directory in directories:
            self.export(directory, step)
