"""Chooses the saved responses of a run that a page shows, and packs them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_gvpo.observe.report.packing import Packed, correct_samples, pack, read
from megatron_gvpo.observe.report.token_texts import TokenTexts
from megatron_gvpo.observe.rollouts.reader import DIRECTORY, saved_steps
from megatron_gvpo.observe.rollouts.schema import Kind, file_name

KINDS: tuple[Kind, ...] = ("eval", "train")
MOST_TOKENS = 10_000_000  # limit for all responses of a report: the page takes about 6 bytes a token

_File = tuple[Kind, int]  # a kind and a step


@dataclass(slots=True)
class Samples:
    """The packed responses of a run.

    `overview`: `files`, the blocks' names, steps and kinds; `rows`, a column of numbers for each property of
    a response; `total`, the number of responses that the run has saved. `blocks`: gzip of JSON by name.
    `correct`: by step, the number of correct and of all samples of each held-out prompt.
    """

    overview: dict[str, Any]
    blocks: dict[str, bytes] = field(default_factory=dict)
    correct: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class Packer:
    """Packs the saved responses of a run again and again, as `watch` does; each file only once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sizes: dict[tuple[_File, int], tuple[int, int]] = {}  # by file and the time when it was written
        self._packed: dict[tuple[_File, int], Packed] = {}
        self._correct: dict[tuple[_File, int], list[tuple[int, int]]] = {}

    def pack(self, pieces: TokenTexts | None, most: int, prefix: str, right_at: float = 1.0) -> Samples:
        """Pack about `most` responses: the files that `chosen` gives. `prefix` begins the blocks' names.
        `right_at`: the run's eval.right_at.

        Raises ConfigError for a damaged file. A file that the run removes meanwhile is left out.
        """
        written = self._written()
        sizes = self._measure(written)
        rows: dict[str, list[Any]] = defaultdict(list)
        samples = Samples({"files": [], "rows": rows, "total": sum(count for count, _ in sizes.values())})
        packed_files: dict[tuple[_File, int], Packed] = {}
        for file in chosen(sizes, most):
            stamp = file, written[file]
            packed = self._packed.get(stamp) or pack(read(self._directory, *file), pieces)
            if len(packed):
                packed_files[stamp] = packed
                _add(samples, packed, file, prefix)
        self._packed = packed_files
        samples.correct = {
            step: self._count((kind, step), when, right_at)
            for (kind, step), when in written.items()
            if kind == "eval"
        }
        return samples

    def _count(self, file: _File, when: int, right_at: float) -> list[tuple[int, int]]:
        """Return, for each prompt of an evaluation, the number of correct samples and the number of all."""
        if (file, when) not in self._correct:
            wanted = ["group", "reward", "rewards"]
            self._correct[file, when] = correct_samples(read(self._directory, *file, wanted), right_at)
        return self._correct[file, when]

    def _written(self) -> dict[_File, int]:
        """The time when each file was written, in nanoseconds, by step."""
        stamps: dict[_File, int] = {}
        for kind in KINDS:
            for step in saved_steps(self._directory, kind):
                with suppress(FileNotFoundError):
                    path = self._directory / DIRECTORY / file_name(kind, step)
                    stamps[kind, step] = path.stat().st_mtime_ns
        return dict(sorted(stamps.items(), key=lambda item: (item[0][1], item[0][0])))

    def _measure(self, written: dict[_File, int]) -> dict[_File, tuple[int, int]]:
        """The numbers of responses and of their tokens, by file."""
        for file, when in written.items():
            if (file, when) not in self._sizes:
                tokens = read(self._directory, *file, ["response_tokens"])["response_tokens"].to_numpy()
                self._sizes[file, when] = len(tokens), int(tokens.sum())
        return {file: self._sizes[file, when] for file, when in written.items()}


def chosen(sizes: Mapping[_File, tuple[int, int]], most: int) -> list[_File]:
    """Whole files, evenly over the steps and with the first and last, of at most `most` responses together.

    The first and the last file of each kind are taken in any case. Evaluations get half, or the rest after
    training, because they have many more responses than a step. `sizes`: responses and tokens by file.
    """
    train, evaluations = ([file for file in sizes if file[0] == kind] for kind in ("train", "eval"))
    limits = np.array([most, MOST_TOKENS])

    def together(files: Sequence[_File]) -> Any:
        return np.array([sizes[file] for file in files]).reshape(-1, 2).sum(0)

    def within(files: Sequence[_File], limits: Any) -> list[_File]:
        counts = range(3, len(files) + 1)
        too_many = bisect_left(counts, True, key=lambda n: bool((together(_spread(files, n)) > limits).any()))
        return _spread(files, too_many + 2)

    some = within(evaluations, np.maximum(limits / 2, limits - together(train)))
    taken = {*some, *within(train, limits - together(some))}
    return [file for file in sizes if file in taken]


def _spread(files: Sequence[_File], count: int) -> list[_File]:
    """At most `count` of the files, at least 2, with equal distances."""
    if len(files) <= count:
        return list(files)
    return [files[round(i * (len(files) - 1) / (count - 1))] for i in range(count)]


def _add(samples: Samples, packed: Packed, file: _File, prefix: str) -> None:
    kind, step = file
    name, files, rows = f"{prefix}{kind}/{step}", samples.overview["files"], samples.overview["rows"]
    rows["file"] += [len(files)] * len(packed)
    for column, values in packed.rows.items():
        rows[column] += values
    files.append({"name": name, "kind": kind, "step": step})
    samples.blocks |= {f"{name}.texts": packed.texts, f"{name}.tokens": packed.tokens}


def pass_intervals(
    correct: dict[int, list[tuple[int, int]]], values: dict[int, float], k: int
) -> dict[int, tuple[float, float]]:
    """The 95 % intervals of pass@k by step, where the saved responses give the value that was logged.

    The two differ if only a part of the evaluation was saved.
    """
    from megatron_gvpo.observe.rollout_metrics import pass_at_k

    intervals = {}
    for step, counts in correct.items():
        if step not in values or not counts or any(n < k for _, n in counts):
            continue
        value_p = [pass_at_k(n, c, k) for c, n in counts]
        if abs(fmean(value_p) - values[step]) < 1e-5:
            intervals[step] = interval(value_p)
    return intervals


# Confidence intervals of pass@k, from the saved responses of an evaluation.

Z = 1.96  # 95 % of a normal distribution is within this many standard errors of the mean


def interval(value_p: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of values in [0, 1], one of each prompt.

    The samples of one prompt are not independent, so the interval counts prompts: Miller 2024, "Adding Error
    Bars to Evals" (arXiv 2411.00640), equation 4. The interval is Wilson's with the number of yes-or-no
    questions that would have the same standard error, which stays inside [0, 1] and has a width also where
    all values are equal. Raises ValueError without values.
    """
    if not value_p:
        raise ValueError("no prompts: their mean has no interval")
    count, mean = len(value_p), fmean(value_p)
    squares = sum((value - mean) ** 2 for value in value_p)
    effective = max(count, mean * (1 - mean) * count**2 / squares) if squares else float(count)
    centre = (mean + Z**2 / (2 * effective)) / (1 + Z**2 / effective)
    spread = mean * (1 - mean) / effective + Z**2 / (4 * effective**2)
    half = Z * math.sqrt(max(0.0, spread)) / (1 + Z**2 / effective)
    return max(0.0, centre - half), min(1.0, centre + half)
