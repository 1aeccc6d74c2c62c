"""A run's records, as the report needs them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import check_regular, read_metrics
from megatron_gvpo.runs.written import json_object

_MOST_SETTINGS = 100_000  # the most keys of a configuration; only YAML's aliases make more


@dataclass(frozen=True, slots=True)
class Run:
    """The records of one run.

    `records`: the lines of metrics.jsonl; `config`: the values of config.yaml by dotted key; `starts`: those
    in run.json; `mismatch`: the certificate of `megatron-gvpo mismatch`, in mismatch.json. A file that the
    directory lacks leaves its field empty.
    """

    directory: Path
    records: list[dict[str, Any]]
    config: dict[str, Any]
    starts: list[dict[str, Any]]
    mismatch: dict[str, Any] | None = None


def read_run(directory: Path) -> Run:
    """Read a run's directory. Raises ConfigError for a directory without a run, and for a damaged file.

    A run that has begun and has made no step has no records.
    """
    file = directory / "metrics.jsonl"
    try:
        records = read_metrics(file)
    except FileNotFoundError:
        if not (directory / "run.json").exists():
            raise ConfigError(
                f"{directory}: no run there (no metrics.jsonl); give the output_dir of a run"
            ) from None
        records = []
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    config, starts = _config(directory / "config.yaml"), _starts(directory / "run.json")
    return Run(directory, records, config, starts, _certificate(directory / "mismatch.json"))


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records as columns: `{"step": [...], "metrics": {name: [value or None, ...]}}`.

    If a step has two records, as after a stop, the values of the later one count.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        by_step.setdefault(record["step"], {}).update(record)
    steps = sorted(by_step)
    names = dict.fromkeys(name for step in steps for name in by_step[step] if name != "step")
    values = {name: [_short(by_step[step].get(name)) for step in steps] for name in names}
    return {"step": steps, "metrics": {name: column for name, column in values.items() if any_number(column)}}


def any_number(column: Sequence[float | None]) -> bool:
    return any(value is not None for value in column)


def short_names(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths by which they differ."""
    parts = [Path(os.path.realpath(path)).parts for path in directories]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"{directories[0]} is given twice")


def _short(value: Any) -> float | None:
    """The number rounded to six digits, which is all that a curve shows; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(f"{value:.6g}")


def _config(file: Path) -> dict[str, Any]:
    try:
        check_regular(file)
        values = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())[:300]
        raise ConfigError(f"{file}: cannot be read as a configuration: {problem}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: this is not the configuration of a run")
    try:
        settings = dict(islice(_flat(values), _MOST_SETTINGS + 1))
    except RecursionError:  # a YAML alias inside the value that it names
        settings = None
    if settings is None or len(settings) > _MOST_SETTINGS:
        raise ConfigError(f"{file}: this is not the configuration of a run: its aliases make it endless")
    return settings


def _flat(values: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict | list) and values:
        items = values.items() if isinstance(values, dict) else enumerate(values)
        simple = isinstance(values, list) and not any(isinstance(value, dict | list) for value in values)
        if not simple:
            for key, value in items:
                yield from _flat(value, f"{at}.{key}" if at else str(key))
            return
    yield at, values


def _certificate(file: Path) -> dict[str, Any] | None:
    """The certificate, if the file has one that the page can show."""
    values = json_object(file)
    causes, worst = values.get("causes"), values.get("worst")
    is_complete = isinstance(causes, list) and isinstance(worst, list) and type(values.get("step")) is int
    return values if is_complete else None


def _starts(file: Path) -> list[dict[str, Any]]:
    try:
        check_regular(file)
        starts = [*json.loads(file.read_text())["starts"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file}: this is not the record of a run: {error}") from None
    keep = ("time", "from_step", "host", "world_size", "command", "directory", "versions")
    return [{key: start.get(key) for key in keep} for start in starts if isinstance(start, dict)]
