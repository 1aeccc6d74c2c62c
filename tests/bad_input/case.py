"""A bad input: how it is made, the command that gets it, and the outcome that a user may expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

TRAIN = (
    "train",
    "run.yaml",
    "output_dir=run",
    "train.steps=1",
    "data.eval=null",
    "checkpoint.export_hf=false",
    "optimizer.warmup_steps=0",
)
RESUME = (
    "train",
    "run.yaml",
    "output_dir=run",
    "--resume",
)  # of a run that was stopped after its second checkpoint

Expected = Literal["refused", "runs", "either"]


@dataclass(frozen=True)
class Case:
    """One input. `spoil` changes the directory that the command runs in: model/, data/, reward.py, run.yaml.

    "refused": exit code 1 or 2, and a line that contains one of `says`; "runs": exit code 0, and the output
    contains one of `says`, if given; "either": one of both.
    """

    room: str
    name: str
    arguments: Sequence[str]
    spoil: Callable[[Path], object] = field(default=lambda _: None)
    expected: Expected = "refused"
    says: Sequence[str] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None: not set
    resumed: bool = False  # the directory holds a run that was stopped after its second checkpoint
    forbidden: str = ""  # a file that must not exist afterwards: code in the input would write it
    before: Callable[[], object] = field(default=lambda: None)  # in the command's process, before it begins
    fresh: bool = False  # the command runs in an interpreter of its own
    shell: str = ""  # a script for bash in place of the command; $PROGRAM is the command line's program
    # Looks at the directory afterwards: "lost", "silent" (it did something else than it was told), or "".
    after: Callable[[Path], str] = field(default=lambda _: "")


def with_values(**values: Any) -> Callable[[Path], object]:
    """Sets keys of the model's config.json; None removes a key."""

    def spoil(task: Path) -> None:
        file = task / "model" / "config.json"
        config = json.loads(file.read_text()) | values
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return spoil


def with_text(name: str, text: str | bytes) -> Callable[[Path], object]:
    """Writes a file of the task's directory."""
    data = text.encode() if isinstance(text, str) else text
    return lambda task: (task / name).write_bytes(data)


def with_line(line: str | bytes, number: int = 7) -> Callable[[Path], object]:
    """Replaces one line of the training data, counted from 1."""

    def spoil(task: Path) -> None:
        file = task / "data" / "train.jsonl"
        lines = file.read_bytes().splitlines()
        lines[number - 1] = line.encode() if isinstance(line, str) else line
        file.write_bytes(b"\n".join(lines) + b"\n")

    return spoil


def with_reward(body: str, top: str = "") -> Callable[[Path], object]:
    """Writes a reward function with this body."""
    lines = "\n".join("    " + line for line in body.splitlines())
    return with_text("reward.py", f"{top}\ndef reward(prompt, rollout):\n{lines}\n")
