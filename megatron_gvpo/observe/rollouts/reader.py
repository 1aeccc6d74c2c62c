"""Reads the rollout files of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_gvpo.observe.rollouts.schema import Kind, file_name, step_of

DIRECTORY = "rollouts"  # folder in the output directory
EVERY_FILE = ("group", "member", "prompt", "response", "reward")  # columns that every version has written


def saved_steps(output_dir: Path | str, kind: Kind = "train") -> list[int]:
    """The steps whose responses the run has saved, in rising order; empty if there are none."""
    directory = Path(output_dir) / DIRECTORY
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    files = {step: name for name in names if (step := step_of(name)) is not None}
    return sorted(step for step in files if (directory / file_name(kind, step)).is_file())


def read_rollouts(
    output_dir: Path | str,
    kind: Kind = "train",
    steps: Collection[int] | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """The rows of the steps that the run has saved, in order: of all, or of those in `steps`.

    `columns` reads only these. A column that a file lacks, because another version wrote it, is null there.
    A file that the run removes meanwhile is left out. Raises ValueError, which names it, for a damaged file.
    """
    directory = Path(output_dir) / DIRECTORY
    tables = []
    for step in saved_steps(output_dir, kind):
        if steps is not None and step not in steps:
            continue
        try:
            tables.append(read_file(directory / file_name(kind, step), columns))
        except FileNotFoundError:
            continue
    if not tables:
        return pa.table({})
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:  # a column has another type in one of them
        raise ValueError(f"{directory}: its files are not of one run: {error}") from None


def read_file(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one file; `columns`: as in `read_rollouts`, but a column that the file lacks is left out.

    Raises FileNotFoundError, and ValueError, which names the file, for a damaged one.
    """
    try:
        with pq.ParquetFile(path) as file:
            known = set(file.schema_arrow.names)
            if missing := [name for name in EVERY_FILE if name not in known]:
                raise ValueError(f"{path}: not a file of rollouts: it has no column {missing[0]!r}")
            return file.read(columns=None if columns is None else [name for name in columns if name in known])
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a file of rollouts that can be read: {error}") from None
