"""Paths that lead nowhere, wherever a command takes one: links to themselves, line breaks, `~nobody`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bad_input.case import TRAIN, Case


def loop(task: Path) -> None:
    """A link to itself, and a directory with a link to its parent."""
    os.symlink("loop", task / "loop")
    (task / "inside").mkdir()
    os.symlink("..", task / "inside" / "up")


def case(name: str, *arguments: str, says: Sequence[str] = ()) -> Case:
    return Case("paths", name, arguments, loop, "refused", says)


def override(key: str, value: str, *says: str) -> Case:
    return case(f"{key}={value!r}"[:60], *TRAIN, f"{key}={value}", says=says or (key,))


KEYS = ("output_dir", "model.path", "data.train.path")
ADAPTER = "model.adapter={rank: 4, alpha: 4, path: loop}"

PATHS = [
    *(override(key, "loop", key, "loop") for key in KEYS),
    *(override(key, r'"a\nb"', "control character") for key in KEYS),
    *(override(key, "~nobody-of-this-name/x", "there is no user of this name") for key in KEYS),
    case("an adapter's path is a link to itself", *TRAIN, ADAPTER, says=("model.adapter.path=loop",)),
    case("the configuration is a link to itself", "train", "loop", says=("loop",)),
    case("a report of a link to itself", "report", "loop", says=("loop",)),
    case("a report of a file", "report", "run.yaml", says=("run.yaml is not a directory",)),
    case("a list of a link to itself", "runs", "loop", says=("loop",)),
    case("convert into a link to itself", "convert", "model", "loop", says=("loop",)),
    case("convert a link to itself", "convert", "loop", "converted", says=("loop",)),
    case("watch a link to itself", "watch", "loop", says=("loop",)),
    case(
        "check a run in a link to itself", "check", "run.yaml", "output_dir=loop", says=("output_dir=loop",)
    ),
    case("an option with a value that it does not take", *TRAIN, "--resume=maybe", says=("--resume=auto",)),
    case("another option with such a value", *TRAIN, "--overwrite=yes", says=("--overwrite",)),
]
