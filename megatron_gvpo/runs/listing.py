"""The runs below a directory: their state, step and best evaluation, from the files that they leave."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import checked_record
from megatron_gvpo.core.plain_values import finite_number
from megatron_gvpo.runs.existing_run import checkpoint_steps
from megatron_gvpo.runs.lock import is_locked
from megatron_gvpo.runs.written import CONFIG, OWN, RUN, json_object

State = Literal["running", "finished", "stopped"]

_DEPTH = 4  # levels of directories that are searched


@dataclass(frozen=True)
class RunSummary:
    """A run on disk.

    `state`: `running` while a process holds its lock, `finished` after its last step, otherwise `stopped`:
    interrupted or failed. `checkpoint` is the newest complete one. `best` is the highest value of the metric,
    at `best_step`; None if no step has it. `is_damaged`: one of the lines of metrics.jsonl that were read is
    not a record of a step.
    """

    directory: Path
    state: State
    step: int | None
    checkpoint: int | None
    reward: float | None  # mean reward of the last step
    best: float | None
    best_step: int | None
    is_damaged: bool


def find_runs(root: Path, metric: str) -> list[RunSummary]:
    """The runs in `root` and below it, by path; the directories that a run writes to are not searched.

    Raises OSError for a `root` that cannot be read.
    """
    return [_summary(directory, metric) for directory in _directories(root, _DEPTH)]


def differing(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """The keys of the runs' configurations that differ, each with its values in the order of the runs.

    A run without the key, or without a configuration that can be read, has None. `output_dir` is the run's
    name. A list counts as one value.
    """
    settings = [_settings(run.directory / CONFIG) for run in runs]
    keys = dict.fromkeys(key for values in settings for key in values if key != "output_dir")
    columns = {key: [values.get(key) for values in settings] for key in keys}
    return {key: column for key, column in columns.items() if any(value != column[0] for value in column)}


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    # imported here, because it takes long and a list without runs does not need it
    from megatron_gvpo.core.yaml_files import read_yaml

    with suppress(ConfigError):
        return dict(_leaves(read_yaml(file), ""))
    return {}


def _leaves(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _directories(directory: Path, depth: int) -> Iterator[Path]:
    own: Collection[str] = ()
    if (directory / RUN).is_file():
        yield directory
        own = OWN
    if depth:
        with os.scandir(directory) as entries:
            folders = [e for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] != "."]
        for path in sorted(folder.path for folder in folders if folder.name not in own):
            with suppress(PermissionError):
                yield from _directories(Path(path), depth - 1)


def _summary(directory: Path, metric: str) -> RunSummary:
    last, best, is_damaged = _metrics(directory / "metrics.jsonl", metric)
    steps, step = checkpoint_steps(directory), last.get("step")
    value, best_step = best or (None, None)
    is_finished = step is not None and _finished_at(directory) == step  # a run may stop before any step
    ended: Literal["finished", "stopped"] = "finished" if is_finished else "stopped"
    return RunSummary(
        directory,
        "running" if is_locked(directory) else ended,
        step,
        steps[-1] if steps else None,
        last.get("reward/mean"),
        value,
        best_step,
        is_damaged,
    )


def _finished_at(directory: Path) -> int | None:
    """The last step of a run that came to its end; a run that was continued since may have later ones."""
    steps = json_object(directory / "summary.json").get("steps")
    return steps if type(steps) is int else None


def _metrics(file: Path, metric: str) -> tuple[dict[str, Any], tuple[float, int] | None, bool]:
    """(the last step's record, the metric's highest value and the first step that has it, is damaged)."""
    is_damaged = False
    best: tuple[float, int] | None = None
    last, key = b"", json.dumps(metric).encode() + b":"
    if not file.is_file():  # a pipe would never end
        return {}, None, os.path.lexists(file)
    with suppress(OSError), file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):  # cut off, or being written
                break
            last = line
            if key in line:  # only such lines are parsed, because a file may have 100,000
                record = _record(line)
                is_damaged |= not record
                value = finite_number(record.get(metric))
                if value is not None and (best is None or value > best[0]):
                    best = value, record["step"]
    record = _record(last)
    return record, best, is_damaged or bool(last and not record)


def _record(line: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        return checked_record(json.loads(line)) or {}
    return {}
