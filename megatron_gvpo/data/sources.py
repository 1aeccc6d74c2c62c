"""Records from JSONL and Parquet files, directories of them, and hub data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet


class DataError(ValueError):
    """Data that cannot be trained on; the message names the file, line and field."""


class Record(NamedTuple):
    """One record. `id` is short and unique in its data set; `where` is its place, for error messages."""

    id: str
    where: str
    fields: Mapping[str, Any]


def read_records(path: str, split: str = "train") -> Iterator[Record]:
    """The records of a file, of a directory's files in the order of their names, or of a hub data set.

    `split` is for hub data sets only. Raises DataError, also where a hub data set is named and the package
    `datasets` is not installed.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        files = sorted(file for file in local.iterdir() if file.suffix in _READERS)
        if not files:
            raise DataError(f"{path}: no .jsonl or .parquet file in this directory")
        for file in files:
            yield from _READERS[file.suffix](file)
    elif local.suffix in _READERS or local.exists() or local.is_absolute() or path.startswith("."):
        if not local.is_file():
            raise DataError(f"{path}: no such file or directory")
        if local.suffix not in _READERS:
            raise DataError(f"{path}: expected a .jsonl or .parquet file, or a directory of them")
        yield from _READERS[local.suffix](local)
    else:
        yield from _read_hub(path, split)


def _read_jsonl(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode("utf-8-sig"))
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
            if not isinstance(fields, dict):
                raise DataError(f"{where}: expected an object {{...}}, found {type(fields).__name__}")
            if b"\\ud" in line.lower() and _has_half_a_pair(fields):
                raise DataError(f"{where}: half of a surrogate pair is no character")
            yield Record(f"{file.name}:{number}", where, fields)


def _has_half_a_pair(fields: dict[str, Any]) -> bool:
    """True, for example, for text cut within an emoji: JSON allows half a pair, and no tokenizer does."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _read_parquet(file: Path) -> Iterator[Record]:
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                for fields in batch.to_pylist():
                    row += 1
                    yield Record(f"{file.name}:{row}", f"{file}, row {row}", fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from None


def _read_hub(name: str, split: str) -> Iterator[Record]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            f"{name!r} is no local file, and reading it as a hub data set needs the package `datasets`: "
            "pip install datasets"
        ) from None
    try:
        rows = load_dataset(name, split=split)
    except Exception as error:  # offline, no such data set, no such split: each has its own type
        raise DataError(f"hub data set {name!r}, split {split!r}: {error}") from error
    for row, fields in enumerate(rows, start=1):
        yield Record(f"{name}/{split}:{row}", f"{name} ({split}), row {row}", fields)


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
