"""Packs saved responses for the page: numbers to sort by for all of them, texts and tokens by the step.

The page reads the numbers when it opens, and the blocks of a step, of compressed JSON, when its responses are
shown or searched.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.observe.report.intervals import interval
from megatron_gvpo.observe.report.pieces import Pieces

MOST_TOKENS = 10_000_000  # of all responses in a report: the page has about 6 bytes for each
SNIPPET = 100  # characters of a text that lists show

# Per-token numbers are rounded to integers: a page needs colours and two digits.
HUNDREDTHS, THOUSANDTHS = 100.0, 1000.0
_TOKENS = ("rollout_logprobs", "trainer_logprobs", "advantages", "weights")


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


def saved(directory: Path) -> list[Path]:
    """The files with responses of the run in `directory`, by step."""
    found = (directory / "rollouts").glob("*.parquet")
    return sorted((f for f in found if f.stem[:5] in ("step_", "eval_")), key=lambda f: (f.stem[5:], f.stem))


def chosen(files: Sequence[Path], most: int) -> list[Path]:
    """Whole files, evenly over the steps and with the first and last, of at most `most` responses together.

    The first and the last file of each kind are taken in any case.
    """
    sizes = {file: _size(file) for file in files}
    kinds = [[file for file in files if file.stem.startswith(kind)] for kind in ("step_", "eval_")]

    def spread(count: int) -> set[Path]:
        return {found for of_kind in kinds for found in _spread(of_kind, count)}

    def too_many(count: int) -> bool:
        taken = [sizes[file] for file in spread(count)]
        return sum(rows for rows, _ in taken) > most or sum(tokens for _, tokens in taken) > MOST_TOKENS

    count = bisect_left(range(3, len(files) + 1), True, key=too_many) + 2
    taken = spread(count)
    return [file for file in files if file in taken]


def _spread(files: Sequence[Path], count: int) -> list[Path]:
    """At most `count` of the files, at least 2, with equal distances."""
    if len(files) <= count:
        return list(files)
    return [files[round(i * (len(files) - 1) / (count - 1))] for i in range(count)]


def pack(files: Sequence[Path], pieces: Pieces | None, most: int, prefix: str) -> Samples:
    """Pack the responses in `files`, or in a part of them (`chosen`), each file in two blocks.

    `prefix`: of the blocks' names. Without `pieces` a response is one text, whose tokens have no colours.
    Raises ConfigError for a damaged file.
    """
    taken = chosen(files, most)
    rows: dict[str, list[Any]] = defaultdict(list)
    samples = Samples({"files": [], "rows": rows, "total": sum(_size(file)[0] for file in files)})
    for number, file in enumerate(taken):
        table = _read(file)
        kind = "eval" if file.stem.startswith("eval_") else "train"
        name, step = f"{prefix}{file.stem}", int(file.stem[5:])
        samples.index["files"].append({"name": name, "kind": kind, "step": step, "rows": table.num_rows})
        texts, tokens = _blocks(table, pieces)
        samples.blocks[f"{name}.texts"] = _compressed(texts)
        samples.blocks[f"{name}.tokens"] = _compressed(tokens)
        _add_rows(rows, table, number, texts)
        if kind == "eval":
            samples.correct[step] = _correct(table)
    return samples


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


def _size(file: Path) -> tuple[int, int]:
    """The number of responses, and of their tokens."""
    tokens = _read(file, ["response_tokens"])["response_tokens"].to_numpy()
    return len(tokens), int(tokens.sum())


def _read(file: Path, wanted: list[str] | None = None) -> Any:
    try:
        return pq.read_table(file, columns=wanted)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{file}: cannot be read as saved responses: {error}") from None


def _blocks(table: Any, pieces: Pieces | None) -> tuple[dict[str, Any], dict[str, Any]]:
    groups, prompts = table["group"].to_pylist(), table["prompt"].to_pylist()
    texts: dict[str, Any] = {
        "prompts": dict(zip(groups, prompts, strict=True)),
        "ids": dict(zip(groups, table["prompt_id"].to_pylist(), strict=True)),
        "responses": table["response"].to_pylist(),
        "rewards": _structs(table, "rewards"),
        "errors": _structs(table, "reward_errors"),
    }
    tokens: dict[str, Any] = {"lengths": None}
    if pieces is not None:
        split = [pieces.split(ids) for ids in table["response_ids"].to_pylist()]
        texts["responses"] = ["".join(row) for row in split]
        # JavaScript counts UTF-16 units.
        tokens["lengths"] = [[len(p) + sum(c > "\uffff" for c in p) for p in row] for row in split]
    engine, trainer, advantages, weights = (_ragged(table, name) for name in _TOKENS)
    tokens["surprise"] = [_integers(None if row is None else -row, HUNDREDTHS) for row in engine]
    tokens["gap"] = [_integers(row, THOUSANDTHS) for row in map(_difference, trainer, engine)]
    tokens["largest_advantage"], tokens["advantage"] = _shares(advantages, _numbers(table, "advantage"))
    tokens["largest_weight"], tokens["weight"] = _shares(weights, _numbers(table, "weight"))
    return texts, tokens


def _add_rows(rows: dict[str, list[Any]], table: Any, number: int, texts: dict[str, Any]) -> None:
    engine, trainer = _ragged(table, "rollout_logprobs"), _ragged(table, "trainer_logprobs")
    gaps = [None if row is None else np.abs(row) for row in map(_difference, trainer, engine)]
    rows["file"] += [number] * table.num_rows
    rows["row"] += range(table.num_rows)
    for name in ("group", "member", "source", "finish_reason", "server", "version_first", "version_last"):
        rows[name] += table[name].to_pylist()
    for name in ("reward", "advantage", "seconds"):
        rows[name] += [_rounded(value) for value in table[name].to_pylist()]
    rows["tokens"] += table["response_tokens"].to_pylist()
    rows["surprise"] += [_mean(None if row is None else -row) for row in engine]
    rows["mismatch"] += [_mean(row) for row in gaps]
    rows["prompt"] += [_snippet(prompt) for prompt in table["prompt"].to_pylist()]
    rows["start"] += [_snippet(response) for response in texts["responses"]]


def _ragged(table: Any, name: str) -> list[np.ndarray | None]:
    """A column of lists as arrays, float64; None where it is null, empty, or absent."""
    if name not in table.column_names:
        return [None] * table.num_rows
    rows = table[name].to_numpy(zero_copy_only=False)
    return [None if row is None or not len(row) else np.asarray(row, np.float64) for row in rows]


def _structs(table: Any, name: str) -> list[dict[str, Any]]:
    """The fields of each struct that are not null."""
    rows = table[name].to_pylist() if name in table.column_names else [None] * table.num_rows
    return [{key: value for key, value in (row or {}).items() if value is not None} for row in rows]


def _difference(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    return None if one is None or other is None or len(one) != len(other) else one - other


def _integers(row: np.ndarray | None, factor: float) -> list[int] | None:
    """The numbers by `factor`, rounded; 0 where one is not finite."""
    return (
        None if row is None else np.rint(np.nan_to_num(row * factor, posinf=0, neginf=0)).astype(int).tolist()
    )


def _numbers(table: Any, name: str) -> list[float | None]:
    return table[name].to_pylist() if name in table.column_names else [None] * table.num_rows


def _shares(
    rows: Sequence[np.ndarray | None], numbers: Sequence[float | None]
) -> tuple[float, list[list[int] | None]]:
    """The largest absolute value, and thousandths of it: one for each token, or one for a whole response."""
    both = zip(rows, numbers, strict=True)
    given = [row if row is not None else None if x is None else np.array([x]) for row, x in both]
    largest = max((float(np.nanmax(np.abs(row))) for row in given if row is not None), default=0.0)
    return _rounded(largest) or 0.0, [
        None if row is None else _integers(row / (largest or 1.0), THOUSANDTHS) for row in given
    ]


def _mean(row: np.ndarray | None) -> float | None:
    finite = None if row is None else row[np.isfinite(row)]
    return None if finite is None or not len(finite) else _rounded(float(finite.mean()))


def _rounded(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def _snippet(text: str) -> str:
    return " ".join(text[: 2 * SNIPPET].split())[:SNIPPET]


def _correct(table: Any) -> list[tuple[int, int]]:
    """Numbers of correct and of all samples of each prompt, as `sampling.evaluation` counts them."""
    counts: dict[int, list[int]] = {}
    rewards = table["reward"].to_pylist()
    for group, reward, parts in zip(
        table["group"].to_pylist(), rewards, _structs(table, "rewards"), strict=True
    ):
        score = next(iter(parts.values()), reward)
        count = counts.setdefault(group, [0, 0])
        count[0] += score >= 1 - 1e-6
        count[1] += 1
    return [(right, n) for right, n in counts.values()]


def _compressed(values: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps(values, separators=(",", ":")).encode(), compresslevel=6, mtime=0)
