"""Replays a step of a run on this machine, from its configuration, records and checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.observe.step_records import StepRecord, read, recorded_steps
from megatron_gvpo.replay.findings import COMPONENTS, Finding, NotPossibleError, Tolerances
from megatron_gvpo.replay.model import ModelReplay, Start
from megatron_gvpo.replay.numbers import NumbersReplay
from megatron_gvpo.replay.rows import RowsReplay, state_after
from megatron_gvpo.runs.one_machine import in_layout
from megatron_gvpo.runs.record import settings_of
from megatron_gvpo.settings.config import Config

Tell = Callable[[Finding], None]


def replay(
    config: Config, step: int, with_model: bool, tell: Tell, layout: Sequence[str] = ()
) -> Finding | None:
    """Compute a recorded step again, and return the first finding that differs, or None.

    `layout`: overrides of `parallel` for the ranks that compute the step; every rank gets the same findings.
    `tell` is called with each finding as soon as it is made. The steps between the checkpoint and `step` are
    computed and compared first. Raises DataError for a step without a record, ConfigError and
    CheckpointError.
    """
    record = read(config.output_dir, step)
    limits = Tolerances.of(config.model.dtype)
    local = in_layout(config, layout)
    start = Start.before(config.output_dir, step, steps_like(config.output_dir, step))
    rows = rows_of(local, step, limits)
    differing: list[Finding] = []

    def passed_on(findings: Iterator[Finding]) -> None:
        for finding in findings:
            tell(finding)
            if finding.outcome == "differs":
                differing.append(finding)

    reason = _without_model(record, start, with_model) or _without_images(rows)
    if start is None or reason:
        passed_on(rows.findings(None))
        passed_on(NumbersReplay(local, record, limits, rows.members).findings(reason))
    else:
        model = ModelReplay(local, config, start, limits)
        state = _estimator_state(local, model, step)
        passed_on(rows.findings(state))
        passed_on(_model_findings(model, rows, step))
    return _first(differing)


def steps_like(output_dir: str, step: int) -> list[int]:
    """The recorded steps that ran under the same settings as `step`, which the same model can repeat."""
    _, since = settings_of(Path(output_dir), step)
    return [recorded for recorded in recorded_steps(output_dir) if recorded > since]


def _without_model(record: StepRecord, start: Start | None, with_model: bool) -> str:
    """Return the reason why the model's part cannot be replayed, or ""."""
    if not with_model:
        return "--without-model"
    if start is None:
        return f"no checkpoint before step {record.step} from which every step is recorded (logging.steps)"
    return ""


def _estimator_state(config: Config, model: ModelReplay, step: int) -> dict[str, object]:
    state = dict(model.state.get("estimator") or {})
    for earlier in range(model.start.step + 1, step):
        state = state_after(config, read(config.output_dir, earlier), state)
    return state


def rows_of(config: Config, step: int, limits: Tolerances) -> RowsReplay:
    rows = RowsReplay(config, read(config.output_dir, step), limits)
    rows.name_members()
    return rows


def earlier_findings(model: ModelReplay, rows: RowsReplay, step: int) -> Iterator[Finding]:
    """Replay a step before the requested one. Raises DataError if the images of its prompts are missing."""
    model.members = rows.members
    try:
        record = rows.with_images()
    except NotPossibleError as reason:
        raise DataError(f"step {step}: {reason}") from None
    return model.findings(record)


def _without_images(rows: RowsReplay) -> str:
    """Return the reason why the images of the step's prompts are not available, or ""."""
    try:
        rows.with_images()
    except NotPossibleError as reason:
        return str(reason)
    return ""


def _model_findings(model: ModelReplay, rows: RowsReplay, step: int) -> Iterator[Finding]:
    """Yield the model's findings in `step`.

    If the model already differs in a step before, its first difference there is the only finding.
    """
    for number in range(model.start.step + 1, step):
        before = rows_of(rows.config, number, rows.limits)
        for finding in earlier_findings(model, before, number):
            if finding.outcome == "differs":
                yield finding
                return
    model.members = rows.members
    yield from model.findings(rows.with_images())


def _first(differing: Sequence[Finding]) -> Finding | None:
    return min(differing, key=lambda f: (f.step, COMPONENTS.index(f.component)), default=None)
