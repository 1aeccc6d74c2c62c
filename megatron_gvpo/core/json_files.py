"""Reads JSON files that hold one object, and reads and writes metrics.jsonl.

A key that comes twice is refused. metrics.jsonl has an object a line, such as
`{"step": 3, "reward/mean": 0.41}`.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.plain_values import finite_number

LFS_POINTER = "version https://git-lfs"  # the begin of a pointer, which stands for a file until it is fetched
LFS_REMEDY = "it is a pointer of Git LFS: fetch the file itself with `git lfs pull`"


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file with one JSON object. Raises ConfigError, which names the file, for any other content."""
    try:
        check_regular(file)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        if text.startswith(LFS_POINTER):
            raise ConfigError(f"{file}: {LFS_REMEDY}") from None
        raise ConfigError(f"{file}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise ConfigError(f"{file}: not valid JSON (nested too deeply)") from None
    except ValueError as error:  # not UTF-8, a number of more digits than Python reads, or a key given twice
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected an object of names and values, found {type(values).__name__}")
    return values


def check_regular(path: Path | str) -> None:
    """Raises ValueError for a pipe, a device or a socket, because opening it may take for ever.

    It accepts a directory and a missing file, which cannot be opened.
    """
    with suppress(OSError):
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ValueError(f"{path}: a pipe, a device or a socket is in the place of this file")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs: the `object_pairs_hook` of json.loads.

    Raises ValueError for a key that comes twice, of which json.loads alone would take the last.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"field {next(key for key in counts if counts[key] > 1)!r} is given twice")
    return fields


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl in file order; a value that was not finite, or that
    exceeds a float, is None.

    An incomplete last line (the writer was killed while writing it) is left out. Raises ValueError, with
    file and line number, for any other line that is not an object with a "step".
    """
    check_regular(path)
    records: list[dict[str, Any]] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = list(file)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            problem = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"{path}, line {number}: not valid JSON ({problem})") from None
        if (record := checked_record(record)) is None:
            raise ValueError(f'{path}, line {number}: expected {{"step": <integer>, ...}}')
        records.append(record)
    return records


def checked_record(record: Any) -> dict[str, Any] | None:
    """A line's record, with None for numbers that are not finite or too large; None if it is not a record."""
    if not isinstance(record, dict) or type(step := record.get("step")) is not int or abs(step) >= 2**63:
        return None
    return {
        name: None if type(value) in (int, float) and finite_number(value) is None else value
        for name, value in record.items()
    }


def last_of_each_step(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records in the order of their steps; of several of one step, the last."""
    by_step = {record["step"]: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


class JsonlWriter:
    """Appends to metrics.jsonl, line by line. It has no buffer, so a failed write is not repeated at exit.

    Lines of an earlier run up to step `keep_until` stay, one for each step; -1 keeps none.
    """

    def __init__(self, path: Path, keep_until: int) -> None:
        old = read_metrics(path) if keep_until >= 0 and path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        _write_lines(aside, (record for record in last_of_each_step(old) if record["step"] <= keep_until))
        os.replace(aside, path)
        self._path, self._file = path, path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        os.stat(self._path)  # raises if the file was removed, because the line would be lost
        # JSON has neither NaN nor infinity; every reader understands null.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = (json.dumps({"step": step, **finite}) + "\n").encode()
        while line:  # a nearly full disk first accepts a part of the line
            line = line[self._file.write(line) :]
        # after a loss of power, the step's checkpoint exists, and so must its line
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
