"""Packs the saved responses of a step for the page: numbers to sort by, texts, and numbers of each token."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Picture
from PIL import ImageOps

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.image_files import data_url, formats
from megatron_gvpo.data.image_files import read as read_image
from megatron_gvpo.observe.report.token_texts import TokenTexts
from megatron_gvpo.observe.rollout_metrics import is_correct
from megatron_gvpo.observe.rollouts.reader import read_rollouts
from megatron_gvpo.observe.rollouts.schema import Kind, schema

SNIPPET = 100  # characters of a text that lists show

# Per-token numbers are rounded to integers: a page needs colours and two digits.
HUNDREDTHS, THOUSANDTHS = 100.0, 1000.0
_TOKENS = ("rollout_logprobs", "trainer_logprobs", "advantages", "weights")


@dataclass(frozen=True, slots=True)
class Packed:
    """The responses of one step.

    `rows`: a column for each property to sort by; `texts` and `tokens`: gzip of JSON, which the page reads
    when it shows or searches the responses.
    """

    rows: dict[str, list[Any]]
    texts: bytes
    tokens: bytes

    def __len__(self) -> int:
        return len(self.rows["reward"])


def pack(table: Any, pieces: TokenTexts | None) -> Packed:
    """Write a table in this compact form.

    Without `pieces`, a response is one text, whose tokens have no colours.
    """
    if not table.num_rows:
        return Packed({"reward": []}, b"", b"")
    texts, tokens = _blocks(table, pieces)
    return Packed(_rows(table, texts), _compressed(texts), _compressed(tokens))


def read(directory: Path, kind: Kind, step: int, wanted: Sequence[str] | None = None) -> Any:
    """The responses of a step; without rows where the run has removed them. Raises ConfigError if damaged."""
    try:
        table = read_rollouts(directory, kind, {step}, wanted)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return table if table.num_rows else schema([]).empty_table()


def images_of(table: Any) -> dict[int, list[str]]:
    """The names of each group's images, for groups that have some; older files have no such column."""
    if "images" not in table.column_names:
        return {}
    pairs = zip(table["group"].to_pylist(), table["images"].to_pylist(), strict=True)
    return {group: names for group, names in pairs if names}


def _blocks(table: Any, pieces: TokenTexts | None) -> tuple[dict[str, Any], dict[str, Any]]:
    groups, prompts = table["group"].to_pylist(), table["prompt"].to_pylist()
    texts: dict[str, Any] = {
        "prompts": dict(zip(groups, prompts, strict=True)),
        "ids": dict(zip(groups, table["prompt_id"].to_pylist(), strict=True)),
        "images": (images := images_of(table)),
        "thumbnails": thumbnails(images),
        "responses": table["response"].to_pylist(),
        "rewards": _structs(table, "rewards"),
        "errors": _structs(table, "reward_errors"),
    }
    tokens: dict[str, Any] = {"lengths": None}
    talks = table["turns"].to_pylist() if "turns" in table.column_names else [None] * table.num_rows
    spoken = zip(talks, texts["responses"], strict=True)
    texts["responses"] = ["".join(map(_text_of, talk)) if talk else text for talk, text in spoken]
    if pieces is not None:
        tokens["lengths"] = [None] * table.num_rows
        for row, ids in enumerate(table["response_ids"].to_pylist()):
            if ids is not None:  # null if a secret was hidden in the row's texts
                split = pieces.split(ids)
                texts["responses"][row] = "".join(split)
                tokens["lengths"][row] = [_units(piece) for piece in split]
    texts["turns"] = [None if talk is None else [_turn(turn, pieces) for turn in talk] for talk in talks]
    engine, trainer, advantages, weights = (_ragged(table, name) for name in _TOKENS)
    tokens["surprise"] = [_integers(None if row is None else -row, HUNDREDTHS) for row in engine]
    tokens["gap"] = [_integers(row, THOUSANDTHS) for row in map(_difference, trainer, engine)]
    tokens["largest_advantage"], tokens["advantage"] = _shares(advantages, _numbers(table, "advantage"))
    tokens["largest_weight"], tokens["weight"] = _shares(weights, _numbers(table, "weight"))
    return texts, tokens


def _turn(turn: dict[str, Any], pieces: TokenTexts | None) -> dict[str, Any]:
    """A turn for the page; `units` is the length of its text where the tokens' texts are not known."""
    observation = turn["given"] or ""
    if pieces is not None and turn["given_ids"] is not None:
        observation = "".join(pieces.split(turn["given_ids"]))
    shown = {name: turn[name] for name in ("agent", "tokens", "reward", "after", "tools")}
    return {**shown, "given": observation, "units": _units(_text_of(turn))}


def _text_of(turn: dict[str, Any]) -> str:
    return turn["text"] or ""


def _units(text: str) -> int:
    """The length of a text as JavaScript counts it, in UTF-16 units."""
    return len(text) + sum(character > "\uffff" for character in text)


def _rows(table: Any, texts: dict[str, Any]) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {"row": list(range(table.num_rows))}
    engine, trainer = _ragged(table, "rollout_logprobs"), _ragged(table, "trainer_logprobs")
    gaps = [None if row is None else np.abs(row) for row in map(_difference, trainer, engine)]
    for name in ("group", "member", "source", "finish_reason", "server", "version_first", "version_last"):
        rows[name] = table[name].to_pylist()
    for name in ("reward", "advantage", "seconds"):
        rows[name] = [_rounded(value) for value in table[name].to_pylist()]
    rows["tokens"] = table["response_tokens"].to_pylist()
    rows["turns"] = [turns and len(turns) for turns in texts["turns"]]
    rows["surprise"] = [_mean(None if row is None else -row) for row in engine]
    rows["mismatch"] = [_mean(row) for row in gaps]
    rows["prompt"] = [_snippet(prompt) for prompt in table["prompt"].to_pylist()]
    rows["start"] = [_snippet(response) for response in texts["responses"]]
    return rows


def _ragged(table: Any, name: str) -> list[np.ndarray | None]:
    """The lists of a column as arrays, float64; None if a list is null, empty, or absent."""
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
    """Return the numbers times `factor`, rounded to integers; 0 for a number that is not finite."""
    return (
        None if row is None else np.rint(np.nan_to_num(row * factor, posinf=0, neginf=0)).astype(int).tolist()
    )


def _numbers(table: Any, name: str) -> list[float | None]:
    return table[name].to_pylist() if name in table.column_names else [None] * table.num_rows


def _shares(
    rows: Sequence[np.ndarray | None], numbers: Sequence[float | None]
) -> tuple[float, list[list[int] | None]]:
    """The largest absolute value, and rows in thousandths of it: values of tokens, or one of a response."""
    singles = [None if number is None else np.array([number]) for number in numbers]
    filled = [single if row is None else row for row, single in zip(rows, singles, strict=True)]
    largest = max((float(np.nanmax(np.abs(row))) for row in filled if row is not None), default=0.0)
    return _rounded(largest) or 0.0, [
        None if row is None else _integers(row / (largest or 1.0), THOUSANDTHS) for row in filled
    ]


def _mean(row: np.ndarray | None) -> float | None:
    finite = None if row is None else row[np.isfinite(row)]
    return None if finite is None or not len(finite) else _rounded(float(finite.mean()))


def _rounded(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def _snippet(text: str) -> str:
    return " ".join(text[: 2 * SNIPPET].split())[:SNIPPET]


def correct_samples(table: Any, right_at: float) -> list[tuple[int, int]]:
    """Numbers of correct and of all samples of each prompt, as `rollout_metrics.summarise` counts them.

    The table needs the columns `group`, `reward` and `rewards` only.
    """
    counts: dict[int, list[int]] = {}
    rewards = table["reward"].to_pylist()
    for group, reward, parts in zip(
        table["group"].to_pylist(), rewards, _structs(table, "rewards"), strict=True
    ):
        score = next(iter(parts.values()), reward)
        count = counts.setdefault(group, [0, 0])
        count[0] += is_correct(score, right_at)
        count[1] += 1
    return [(right, n) for right, n in counts.values()]


def _compressed(values: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps(values, separators=(",", ":")).encode(), compresslevel=6, mtime=0)


# Small pictures of prompts' images: the page holds them, because it loads nothing from elsewhere.

SIDE = 192  # the most pixels of a side
MOST_BYTES = 1 << 20  # limit for all pictures of a step


def thumbnails(images: Mapping[int, Sequence[str]]) -> dict[int, list[str | None]]:
    """data: URLs for the images of each group, by their names.

    None for an image whose file is missing or damaged, and for all images after a step's first MiB.
    """
    made: dict[str, str | None] = {}
    room = MOST_BYTES
    for names in images.values():
        for name in names:
            if name not in made:
                url = _thumbnail(name)
                room -= len(url or "")
                made[name] = url if room >= 0 else None
    return {group: [made[name] for name in names] for group, names in images.items()}


def _thumbnail(name: str) -> str | None:
    try:
        stored = Picture.open(io.BytesIO(read_image(name)), formats=formats())
        stored.draft("RGB", (SIDE, SIDE))  # a large JPEG is decoded at a fraction of its size
        picture = ImageOps.exif_transpose(stored).convert("RGB")
    except Exception:  # damaged files raise errors of many types
        return None
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "jpeg", quality=80)
    return data_url(file.getvalue())
