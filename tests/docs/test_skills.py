"""The skills lead to their ends: their files are written and their blocks run, in order."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from helpers.doc_blocks import Block, blocks
from helpers.paths import ROOT

TRAINING, METHOD = (f"skills/{name}/SKILL.md" for name in ("run_a_training", "add_a_method"))


def write(block: Block, directory: Path) -> None:
    """Write the block's file, or put the block into one."""
    text = textwrap.dedent(block.text)
    if block.kind == "file":
        (directory / block.value).write_text(text)
        return
    name, _, beginning = block.value.partition(": ")
    lines = (directory / name).read_text().splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith(beginning)), None)
    assert first is not None, f"{block}: no line of {name} begins with {beginning!r}"
    (directory / name).write_text("".join([*lines[:first], text, *lines[first:]]))


def run(block: Block, directory: Path, package: Path) -> None:
    assert block.language == "bash", block
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment["PYTHONPATH"] = str(package)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", textwrap.dedent(block.text)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def follow(steps: Sequence[Block], directory: Path, package: Path) -> int:
    """Do what the blocks say; returns the number of blocks that were commands."""
    for block in steps:
        (write if block.kind else partial(run, package=package))(block, directory)
    return sum(not block.kind for block in steps)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the repository, whose files are older than its environment: `make` builds no other."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    copy = tmp_path / "repository"
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
            os.utime(copy / name, (1e9, 1e9))
    (copy / ".venv").symlink_to(sys.prefix)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=copy, check=True)
    return copy


@pytest.mark.proof
def test_a_training_is_run_as_the_skill_says(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert follow(blocks(TRAINING), tmp_path, ROOT) == 4
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["steps"] == 3 and "pass_at_1_after" in summary
    assert (tmp_path / "runs" / "mine" / "hf" / "config.json").is_file()


def test_a_method_has_the_gradient_of_its_formula_where_the_skill_says_so(repository: Path) -> None:
    """As far as the method's own test; all that is put into a file finds its place there."""
    steps = blocks(METHOD)
    own_test = next(i for i, block in enumerate(steps) if not block.kind)
    follow(steps[: own_test + 1], repository, repository)
    follow([block for block in steps[own_test + 1 :] if block.kind], repository, repository)


@pytest.mark.proof
def test_a_method_is_added_as_the_skill_says(repository: Path) -> None:
    assert follow(blocks(METHOD), repository, repository) == 5
