"""The saved responses of a run: which of them a page shows, packed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_gvpo.observe.report.intervals import interval
from megatron_gvpo.observe.report.packing import Packed, pack, read
from megatron_gvpo.observe.report.pieces import Pieces

MOST_TOKENS = 10_000_000  # of all responses in a report: the page has about 6 bytes for each

_Stamp = tuple[str, int]  # a file's name, and when it was written


@dataclass(slots=True)
class Samples:
    """The packed responses of a run.

    `index`: `files`, the blocks' names, steps and kinds; `rows`, a column of numbers for each property of a
    response; `total`, how many responses the run has saved. `blocks`: gzip of JSON by name. `correct`: by
    step, the number of correct and of all samples of each held-out prompt.
    """

    index: dict[str, Any]
    blocks: dict[str, bytes] = field(default_factory=dict)
    correct: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class Packer:
    """Packs the saved responses of a run again and again, as `watch` does; each file only once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "rollouts"
        self._sizes: dict[_Stamp, tuple[int, int]] = {}
        self._packed: dict[_Stamp, Packed] = {}

    def pack(self, pieces: Pieces | None, most: int, prefix: str) -> Samples:
        """Pack the responses of about `most` (`chosen`). `prefix`: of the blocks' names.

        Raises ConfigError for a damaged file. A file that the run removes meanwhile is left out.
        """
        sizes: dict[Path, tuple[int, int]] = {}
        for file in self._saved():
            with suppress(FileNotFoundError):
                sizes[file] = self._size(file)
        rows: dict[str, list[Any]] = defaultdict(list)
        samples = Samples({"files": [], "rows": rows, "total": sum(count for count, _ in sizes.values())})
        kept: dict[_Stamp, Packed] = {}
        for file in chosen(sizes, most):
            with suppress(FileNotFoundError):
                stamp = _stamp(file)
                kept[stamp] = packed = self._packed.get(stamp) or pack(file, pieces)
                _add(samples, packed, file, prefix)
        self._packed = kept
        return samples

    def _saved(self) -> list[Path]:
        """The files with responses, by step."""
        found = [file for file in self._directory.glob("*.parquet") if file.stem[:5] in ("step_", "eval_")]
        return sorted(found, key=lambda file: (file.stem[5:], file.stem))

    def _size(self, file: Path) -> tuple[int, int]:
        stamp = _stamp(file)
        if stamp not in self._sizes:
            tokens = read(file, ["response_tokens"])["response_tokens"].to_numpy()
            self._sizes[stamp] = len(tokens), int(tokens.sum())
        return self._sizes[stamp]


def chosen(sizes: dict[Path, tuple[int, int]], most: int) -> list[Path]:
    """Whole files, evenly over the steps and with the first and last, of at most `most` responses together.

    The first and the last file of each kind are taken in any case. `sizes`: responses and tokens by file.
    """
    kinds = [[file for file in sizes if file.stem.startswith(kind)] for kind in ("step_", "eval_")]

    def spread(count: int) -> set[Path]:
        return {found for of_kind in kinds for found in _spread(of_kind, count)}

    def too_many(count: int) -> bool:
        taken = [sizes[file] for file in spread(count)]
        return sum(rows for rows, _ in taken) > most or sum(tokens for _, tokens in taken) > MOST_TOKENS

    count = bisect_left(range(3, len(sizes) + 1), True, key=too_many) + 2
    taken = spread(count)
    return [file for file in sizes if file in taken]


def _spread(files: Sequence[Path], count: int) -> list[Path]:
    """At most `count` of the files, at least 2, with equal distances."""
    if len(files) <= count:
        return list(files)
    return [files[round(i * (len(files) - 1) / (count - 1))] for i in range(count)]


def _stamp(file: Path) -> _Stamp:
    return file.name, file.stat().st_mtime_ns


def _add(samples: Samples, packed: Packed, file: Path, prefix: str) -> None:
    kind, step = "eval" if file.stem.startswith("eval_") else "train", int(file.stem[5:])
    name, files, rows = f"{prefix}{file.stem}", samples.index["files"], samples.index["rows"]
    rows["file"] += [len(files)] * len(packed)
    for column, values in packed.rows.items():
        rows[column] += values
    files.append({"name": name, "kind": kind, "step": step})
    samples.blocks |= {f"{name}.texts": packed.texts, f"{name}.tokens": packed.tokens}
    if kind == "eval":
        samples.correct[step] = packed.correct


def pass_intervals(
    correct: dict[int, list[tuple[int, int]]], values: dict[int, float], k: int
) -> dict[int, tuple[float, float]]:
    """The 95 % intervals of pass@k by step, where the saved responses give the value that was logged.

    They do not where only a part of the evaluation was saved.
    """
    from megatron_gvpo.sampling.evaluation import pass_at_k

    found = {}
    for step, counts in correct.items():
        if step not in values or not counts or any(n < k for _, n in counts):
            continue
        value_p = [pass_at_k(n, c, k) for c, n in counts]
        if abs(fmean(value_p) - values[step]) < 1e-5:
            found[step] = interval(value_p)
    return found
