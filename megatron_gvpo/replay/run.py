"""Replays a step of a run on this machine: configuration, records, checkpoint, in the order of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_gvpo.observe.step_records import StepRecord, read, recorded_steps
from megatron_gvpo.replay.findings import COMPONENTS, Finding, Tolerances
from megatron_gvpo.replay.model import ModelReplay, Start
from megatron_gvpo.replay.rows import RowsReplay, state_after
from megatron_gvpo.runs.one_machine import on_one_rank
from megatron_gvpo.settings.config import Config

Tell = Callable[[Finding], None]
_MODEL = COMPONENTS[COMPONENTS.index("start weights") :]


def replay(config: Config, step: int, with_model: bool, tell: Tell) -> Finding | None:
    """Compute a recorded step again; returns the first finding that differs, or None.

    `tell` gets every finding as it comes. Steps between the checkpoint and `step` are taken first, and are
    compared as well. Raises DataError for a step without a record, ConfigError and CheckpointError.
    """
    record = read(config.output_dir, step)
    limits = Tolerances.of(config.model.dtype)
    local = on_one_rank(config)
    start = Start.before(config.output_dir, step, recorded_steps(config.output_dir))
    rows = RowsReplay(local, record, limits)
    rows.name_members()
    differing: list[Finding] = []

    def passed_on(findings: Iterator[Finding]) -> None:
        for finding in findings:
            tell(finding)
            if finding.outcome == "differs":
                differing.append(finding)

    reason = _without_model(record, start, with_model)
    if start is None or reason:
        passed_on(rows.findings(None))
        for component in _MODEL:
            tell(Finding(component, step, "not checked", reason))
    else:
        model = ModelReplay(local, config, start, limits)
        state = _estimator_state(local, model, step)
        passed_on(rows.findings(state))
        passed_on(_model_findings(model, rows, record))
    return _first(differing)


def _without_model(record: StepRecord, start: Start | None, with_model: bool) -> str:
    """Why the model's part cannot be replayed, or ""."""
    if not with_model:
        return "--without-model"
    if record.has_images:
        return "the prompts have images, which records leave out"
    if start is None:
        return f"no checkpoint before step {record.step} from which every step is recorded (logging.steps)"
    return ""


def _estimator_state(config: Config, model: ModelReplay, step: int) -> dict[str, object]:
    state = dict(model.state.get("estimator") or {})
    for earlier in range(model.start.step + 1, step):
        state = state_after(config, read(config.output_dir, earlier), state)
    return state


def _model_findings(model: ModelReplay, rows: RowsReplay, record: StepRecord) -> Iterator[Finding]:
    """The findings of the model in `record`'s step, after those of earlier steps that differ."""
    for step in range(model.start.step + 1, record.step):
        earlier = read(rows.config.output_dir, step)
        before = RowsReplay(rows.config, earlier, rows.limits)
        before.name_members()
        model.members = before.members
        for finding in model.findings(earlier):
            if finding.outcome == "differs":
                yield finding
                return
    model.members = rows.members
    yield from model.findings(record)


def _first(differing: Sequence[Finding]) -> Finding | None:
    return min(differing, key=lambda f: (f.step, COMPONENTS.index(f.component)), default=None)
