"""`Recorder`, the callback that writes a run's records. `Callback`, the base class, is in trainer.py."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.collectives import all_gather_msgpack
from megatron_gvpo.core.secrets import as_written
from megatron_gvpo.observe import MetricLogger, Progress, memory_report, plot_curve, read_metrics, time_report
from megatron_gvpo.observe.alerts import Finder
from megatron_gvpo.observe.loggers.services import ServiceError
from megatron_gvpo.observe.monitor import DeviceMonitor, by_machine
from megatron_gvpo.observe.rollouts.writer import RolloutWriter
from megatron_gvpo.observe.samples import few_samples, worth_showing
from megatron_gvpo.observe.step_records import StepRecord, StepRecords
from megatron_gvpo.observe.summary import has_curves
from megatron_gvpo.runs.existing_run import metrics_problems, newest_step
from megatron_gvpo.runs.record import write_complete
from megatron_gvpo.runs.written import RUN
from megatron_gvpo.training.trainer import Callback as Callback
from megatron_gvpo.training.trainer import Trainer

if TYPE_CHECKING:
    from megatron_gvpo.groups import Group
    from megatron_gvpo.observe.rollouts.table import Responses

log = logging.getLogger(__name__)


class OutputError(RuntimeError):
    """The run's records could not be written, e.g. on a full disk, or a tracking service could not be opened.

    Complete checkpoints are untouched.
    """


class Recorder(Callback):
    """Shows progress and writes the run's records, on rank 0.

    The records are metrics.jsonl, TensorBoard's files and the responses in rollouts/, and at the end
    summary.json and curve.png. The first rank of every machine reads its GPUs' state for the metrics
    device/*. Raises OutputError, on all ranks at once, if the file system refuses a write.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._monitor: DeviceMonitor | None = None
        self._responses: list[Responses] = []  # responses of the present step

    def on_start(self, trainer: Trainer) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self._monitor = self._opened.enter_context(DeviceMonitor())
        self._write(trainer, lambda: self._open(trainer))

    def on_responses(self, trainer: Trainer, responses: Responses) -> None:
        if trainer.is_main:
            self._responses.append(responses.with_texts(trainer.components.tokenizer.decode))

    def on_record(self, trainer: Trainer, record: StepRecord, groups: Sequence[Group]) -> None:
        self._write(trainer, lambda: self._records.write(record, groups))

    def on_step(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        taken = all_gather_msgpack(self._monitor.take() if self._monitor else None)
        self._write(trainer, lambda: self._log(step, {**metrics, **by_machine(taken)}))

    def on_checkpoint(self, trainer: Trainer, directory: Path) -> None:
        if trainer.is_main:
            self._progress.note(f"checkpoint: {directory}")

    def on_end(self, trainer: Trainer) -> None:
        self._write(trainer, lambda: self._conclude(trainer))

    def on_exit(self, trainer: Trainer) -> None:
        try:
            self._opened.close()
        except OSError as error:
            raise OutputError(_refused(trainer, error)) from None

    def _write(self, trainer: Trainer, write: Callable[[], None]) -> None:
        """Calls `write` on rank 0 and raises its failure on all ranks, so that none waits for a failed rank.

        Every rank must call this: it is a collective.
        """
        problem = None
        try:
            if trainer.is_main:
                write()
        except OSError as error:
            problem = _refused(trainer, error)
        except ServiceError as error:
            problem = str(error)
        if problems := [text for text in all_gather_msgpack(problem) if text]:
            raise OutputError(problems[0])

    def _open(self, trainer: Trainer) -> None:
        config, resume_step = trainer.config, trainer.step if trainer.resumed else None
        self._directory = Path(config.output_dir)
        recorded_step = resume_step
        if resume_step is not None:
            # A step that the earlier run did not report is recorded now, as far as its data exist.
            recorded_step = resume_step - trainer.reports_resumed_step
            for problem in metrics_problems(self._directory / "metrics.jsonl", recorded_step):
                log.warning(problem)
        self._logger = MetricLogger(
            config.logging,
            self._directory,
            resume_step=recorded_step,
            run_config=as_written(config),
        )
        self._earlier_steps = -1 if recorded_step is None else recorded_step
        self._opened.callback(self._logger.close)
        components = [component.name for component in config.rewards.components]
        self._rollouts = RolloutWriter(self._directory, config.logging.rollouts, components, resume_step)
        if recorded_step is not None and (lost_file := self._rollouts.problem(recorded_step)):
            log.warning(lost_file)
        self._opened.callback(self._rollouts.close)
        self._records = StepRecords(self._directory, config.logging.steps, resume_step)
        self._opened.callback(self._write_responses)  # also writes responses of a step that was not reported
        self._progress = Progress(
            config.logging.progress,
            config.train.steps,
            title=config.output_dir,
            phase=trainer.components.timer.current,
        )
        self._opened.callback(self._progress.close)
        if config.train.share_prompts == "auto" and config.samples_responses and config.rollout.n > 1:
            self._progress.note(f"train.share_prompts=auto: {_prompt_sharing(trainer)}")
        self._alerts = Finder()
        if resume_step is not None:
            for record in read_metrics(self._directory / "metrics.jsonl"):
                self._alerts.update(record["step"], {n: v for n, v in record.items() if n != "step"})
        self._begin = time.perf_counter()

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        samples = [sample for responses in self._responses for sample in few_samples(responses)]
        if worth_showing(step, samples):
            self._logger.show(step, samples)
            self._progress.sample(samples[-1 if step % 2 else 0])
        alerts = self._alerts.update(step, metrics)
        for alert in alerts:
            self._logger.tell(alert)
        self._logger.log(step, metrics)
        self._write_responses()
        self._progress.update(step, metrics)
        for alert in alerts:
            self._progress.note(f"ALERT {alert}")
        if table := memory_report(metrics):
            self._progress.note(table)

    def _write_responses(self) -> None:
        while self._responses:
            self._rollouts.write(self._responses.pop(0))

    def _conclude(self, trainer: Trainer) -> None:
        records = read_metrics(self._directory / "metrics.jsonl")
        graded = [r["eval/pass@1"] for r in records if r.get("eval/pass@1") is not None]
        seconds = self._seconds(trainer, records)
        summary = {
            "pass_at_1_before": graded[0] if graded else None,
            "pass_at_1_after": graded[-1] if graded else None,
            "steps": trainer.step,
            "seconds": seconds,
        }
        if has_curves(records):  # there are no curves if the metrics were moved away or never finite
            plot_curve(self._directory / "metrics.jsonl", self._directory / "curve.png")
        # This is the last record, and it is written completely or not at all: a run without it is not
        # finished.
        write_complete(self._directory / "summary.json", json.dumps(summary, indent=2) + "\n")
        phases = {name: value for name, value in seconds.items() if name != "total"}
        self._progress.note(time_report(phases, seconds["total"]))
        self._progress.close()

    def _seconds(self, trainer: Trainer, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The seconds of each phase over all starts of the run; of earlier ones, those of recorded steps."""
        seconds = {"total": time.perf_counter() - self._begin, **trainer.components.timer.totals}
        for record in records:
            if record["step"] > self._earlier_steps:
                continue
            for name, value in record.items():
                if name.startswith("time/"):
                    phase = "total" if name == "time/step" else name.removeprefix("time/")
                    seconds[phase] = seconds.get(phase, 0.0) + (value or 0.0)
        return seconds


def _prompt_sharing(trainer: Trainer) -> str:
    """Say if a prompt is computed once for its responses, or why not."""
    model, rollout = trainer.components.policy.model, trainer.config.rollout
    if rollout.conversation is not None:
        return "off: every turn of a conversation has a context of its own"
    if model.share_prompts:
        return f"on, a prompt is computed once for its {rollout.n} responses"
    return f"off: {model.obstacle_to_sharing}"


def _refused(trainer: Trainer, problem: OSError) -> str:
    directory = Path(trainer.config.output_dir)
    begin = f"cannot write the records in output_dir={directory}: {problem}"
    if not (directory / RUN).is_file():  # a checkpoint or rollouts file can make the directory again
        return (
            f"{begin}; the record of the run is gone, so the directory was removed, moved or emptied while "
            "the run wrote to it, and its checkpoints with it: put them back and continue with --resume, or "
            "start the run again in another output_dir"
        )
    if newest_step(directory) is None:
        return f"{begin}; there is no checkpoint yet: make room and start the run again with --overwrite"
    return f"{begin}; complete checkpoints there are untouched: make room and continue with --resume"
