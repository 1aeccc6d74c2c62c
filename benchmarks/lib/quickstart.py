"""Parts that comparisons on the quickstart's task share: its supervised start, and runs in processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
CPU = ROOT / "examples" / "cpu.yaml"
LIMIT_S = 3600  # the longest run, in seconds


def make_start(runs: Path) -> None:
    """Make the task and the supervised model with which every run begins, unless they are in `runs`."""
    if (runs / "sft" / "hf" / "config.json").exists():
        return
    python([str(QUICKSTART / "make_task.py"), "--out", str(runs / "task")])
    overrides = [f"output_dir={runs}/sft", f"model.path={runs}/task/model"]
    overrides.append(f"data.train.path={runs}/task/data/train.jsonl")
    files = [str(QUICKSTART / "sft.yaml"), str(CPU)]
    python(["-m", "megatron_gvpo", "train", "--overwrite", *files, *overrides])


def python(command: list[str]) -> str:
    """Run a command with one thread, and return the last line of its output.

    If the command fails, this program exits with the end of the command's output.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=LIMIT_S, env=environment
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def commit() -> str:
    """The short name of the commit at which a result was measured."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
