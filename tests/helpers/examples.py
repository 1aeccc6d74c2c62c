"""Runs of the examples whose policy talks with an environment, a tool or a program, cut down to two steps."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT
from megatron_gvpo import cli
from megatron_gvpo.observe import read_metrics


def make_task(name: str, directory: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make the example's task in `directory`, the current one from here on; returns the task's folder."""
    patch.chdir(directory)
    (directory / "examples").symlink_to(ROOT / "examples")
    task = Path("runs") / name / "task"
    patch.setattr(sys, "argv", ["make_task.py", "--out", str(task)])
    runpy.run_path(str(ROOT / "examples" / name / "make_task.py"), run_name="__main__")
    return task


def train(name: str, *own: str, prompts: int = 8) -> Path:
    """Train both parts of the example on its task, and check the metrics; returns the run's directory."""
    few = (
        f"train.prompts_per_step={prompts}",
        "data.train.limit=64",
        "logging.progress=off",
        "train.steps=2",
    )
    few = ("examples/cpu.yaml", *few, "optimizer.warmup_steps=1")
    assert cli.main(["train", f"examples/{name}/sft.yaml", *few]) == 0
    own = (*own, "data.eval.limit=4", "checkpoint.export_hf=false")
    # Like run.py, which trains into a directory that holds the task and the warm start.
    assert cli.main(["train", "--overwrite", f"examples/{name}/gvpo.yaml", *few, *own]) == 0
    out = Path("runs") / name
    first, *steps = read_metrics(out / "metrics.jsonl")
    assert first["eval/pass@1"] <= 1 and len(steps) == 2
    assert all(step["env/turns"] >= 1 and step["env/lost"] == 0 for step in steps)
    return out
