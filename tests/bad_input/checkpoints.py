# mypy: disable-error-code="func-returns-value"
"""Checkpoints that were damaged, mixed up or made by an attacker."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bad_input.case import RESUME, Case, Expected, with_text
from bad_input.weights import RunsCode

FALLBACK = ("step_",)


def checkpoints_of(task: Path) -> list[Path]:
    """The checkpoints, the oldest first."""
    return sorted((task / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name.split("_")[-1]))


def in_newest(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda task: change(checkpoints_of(task)[-1])


def in_all(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda task: [change(path) for path in checkpoints_of(task)]


def shard(checkpoint: Path) -> Path:
    """The largest file."""
    return max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size)


def flip(checkpoint: Path) -> None:
    """Flip one bit in the middle of the largest file."""
    data = bytearray(shard(checkpoint).read_bytes())
    data[len(data) // 2] ^= 4
    shard(checkpoint).write_bytes(bytes(data))


def flip_everywhere(checkpoint: Path) -> None:
    """Flip one bit in every 1000 bytes of the largest file: no tensor of any size stays whole."""
    data = bytearray(shard(checkpoint).read_bytes())
    data[::1000] = bytes(byte ^ 4 for byte in data[::1000])
    shard(checkpoint).write_bytes(bytes(data))


def write(name: str, data: bytes) -> Callable[[Path], object]:
    """Overwrite every file of this name below a checkpoint, or create it there."""

    def change(checkpoint: Path) -> None:
        files = list(checkpoint.rglob(name)) or [checkpoint / name]
        for file in files:
            file.write_bytes(data)

    return change


def state(**values: Any) -> Callable[[Path], object]:
    def change(checkpoint: Path) -> None:
        for file in checkpoint.rglob("state.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def plant(checkpoint: Path) -> None:
    """A pickle that runs code in place of everything that could be one."""
    for file in checkpoint.rglob("*"):
        if file.is_file() and file.suffix in ("", ".pt", ".metadata", ".bin"):
            file.write_bytes(pickle.dumps(RunsCode()))
    for name in ("common.pt", ".metadata"):
        for directory in {checkpoint, *(f.parent for f in checkpoint.rglob("*.distcp"))}:
            (directory / name).write_bytes(pickle.dumps(RunsCode()))


def remove(name: str) -> Callable[[Path], object]:
    return lambda checkpoint: [path.unlink() for path in checkpoint.rglob(name)]


def case(
    name: str,
    spoil: Callable[[Path], object],
    *says: str,
    expected: Expected = "refused",
    arguments: Sequence[str] = RESUME,
    forbidden: str = "",
) -> Case:
    return Case("checkpoints", name, arguments, spoil, expected, says, resumed=True, forbidden=forbidden)


EXPORT = ("export", "run.yaml", "output_dir=run", "--out", "exported")
EVAL = ("eval", "run.yaml", "output_dir=run", "--resume", "data.eval={path: data/test.parquet, limit: 2}")
CHANGED = "--resume"

CHECKPOINTS = [
    case("a sound resume", lambda task: None, expected="runs"),
    case("newest: a flipped bit", in_newest(flip), *FALLBACK, expected="runs"),
    case(
        "newest: shard cut in half",
        in_newest(lambda c: shard(c).write_bytes(shard(c).read_bytes()[:1000])),
        *FALLBACK,
        expected="runs",
    ),
    case("newest: shard removed", in_newest(lambda c: shard(c).unlink()), *FALLBACK, expected="runs"),
    case(
        "newest: state.json cut off", in_newest(write("state.json", b'{"step": ')), *FALLBACK, expected="runs"
    ),
    case("newest: state.json a list", in_newest(write("state.json", b"[]")), *FALLBACK, expected="runs"),
    case("newest: state.json removed", in_newest(remove("state.json")), expected="runs"),
    case("newest: step negative", in_newest(state(step=-3)), *FALLBACK, expected="runs"),
    case("newest: step a string", in_newest(state(step="4")), *FALLBACK, expected="runs"),
    case("newest: step true", in_newest(state(step=True)), *FALLBACK, expected="runs"),
    case("newest: step of another checkpoint", in_newest(state(step=2)), *FALLBACK, expected="either"),
    case("newest: order a string", in_newest(state(order="x")), *FALLBACK, expected="runs"),
    case("newest: an empty directory", in_newest(lambda c: (shutil.rmtree(c), c.mkdir())), expected="runs"),
    case(
        "newest: a symbolic link to itself",
        in_newest(lambda c: (shutil.rmtree(c), c.symlink_to(c.name))),
        expected="either",
    ),
    case("newest: a file", in_newest(lambda c: (shutil.rmtree(c), c.write_text("x"))), expected="either"),
    case(
        "a foreign directory beside them",
        lambda t: (t / "run/checkpoints/step_99999999").mkdir(),
        expected="runs",
    ),
    case(
        "a foreign file beside them",
        lambda t: (t / "run/checkpoints/notes.txt").write_text("x"),
        expected="runs",
    ),
    case("all: a flipped bit", in_all(flip), *FALLBACK),
    case("all: flipped, export", in_all(flip_everywhere), *FALLBACK, arguments=EXPORT),
    case("all: flipped, eval", in_all(flip_everywhere), *FALLBACK, arguments=EVAL),
    case(
        "all: a flipped bit in the optimizer's state, export", in_all(flip), expected="runs", arguments=EXPORT
    ),
    case("all: code in pickles, train", in_all(plant), arguments=RESUME, forbidden="ran_code"),
    case("all: code in pickles, export", in_all(plant), arguments=EXPORT, forbidden="ran_code"),
    case("all: code in pickles, eval", in_all(plant), arguments=EVAL, forbidden="ran_code"),
    case(
        "code in an extra pickle",
        in_newest(write("extra.pt", pickle.dumps(RunsCode()))),
        expected="either",
        forbidden="ran_code",
    ),
    case("another learning rate", lambda t: None, "optimizer.lr", arguments=(*RESUME, "optimizer.lr=5e-3")),
    case(
        "another weight decay",
        lambda t: None,
        "weight_decay",
        arguments=(*RESUME, "optimizer.weight_decay=0.3"),
    ),
    case("another clip", lambda t: None, "clip_grad", arguments=(*RESUME, "optimizer.clip_grad=0.1")),
    case(
        "another temperature", lambda t: None, "temperature", arguments=(*RESUME, "rollout.temperature=0.5")
    ),
    case("another group size", lambda t: None, "rollout.n", arguments=(*RESUME, "rollout.n=6")),
    case("another seed", lambda t: None, "train.seed", arguments=(*RESUME, "train.seed=9")),
    case("another recipe", lambda t: None, "algorithm", arguments=(*RESUME, "algorithm=gpg")),
    case("another dtype", lambda t: None, "model.dtype", arguments=(*RESUME, "model.dtype=bfloat16")),
    case(
        "another reward weight",
        lambda t: None,
        "rewards",
        arguments=(*RESUME, "rewards.components=[{name: variety, function: 'reward.py:reward', weight: -1}]"),
    ),
    case("shuffle off", lambda t: None, "data.shuffle", arguments=(*RESUME, "data.shuffle=false")),
    case(
        "other training data of the same length",
        lambda t: (t / "data/train.jsonl").write_text(
            (t / "data/train.jsonl").read_text().replace('"7', '"6')
        ),
        "data.train",
    ),
    case(
        "another reward file",
        with_text("reward.py", "def reward(prompt, rollout):\n    return 0.0\n"),
        "rewards.components.0.function",
    ),
    case(
        "other micro-batches: only the layout",
        lambda t: None,
        expected="runs",
        arguments=(*RESUME, "train.max_tokens_per_micro_batch=256"),
    ),
    case("more steps", lambda t: None, expected="runs", arguments=(*RESUME, "train.steps=14")),
    case(
        "fewer steps than done",
        lambda t: None,
        "train.steps",
        "step",
        arguments=(*RESUME, "train.steps=2"),
        expected="either",
    ),
    case("metrics.jsonl of rubbish", with_text("run/metrics.jsonl", "nonsense\n{\n"), "metrics.jsonl"),
    case("metrics.jsonl removed", lambda t: (t / "run/metrics.jsonl").unlink(), expected="either"),
    case(
        "metrics.jsonl a directory",
        lambda t: ((t / "run/metrics.jsonl").unlink(), (t / "run/metrics.jsonl").mkdir()),
        "metrics.jsonl",
    ),
    case("checkpoints removed", lambda t: shutil.rmtree(t / "run/checkpoints"), "checkpoint"),
    case("resume of nothing", lambda t: shutil.rmtree(t / "run"), "run", "checkpoint"),
    case("neither resume nor overwrite", lambda t: None, "--resume", arguments=RESUME[:3]),
]
