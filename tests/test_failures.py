"""A rank under `megatron_gvpo.cluster.rank`, and what `megatron_gvpo.cluster.failures` says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gvpo.cluster import failures


def run(program: str, place: Path) -> int:
    """As rank 3; returns the exit code."""
    file = place / "program.py"
    file.write_text(program)
    logs = place / "logs"
    logs.mkdir()
    environment = {**os.environ, "RANK": "3", "MEGATRON_GVPO_LOGS": str(logs), "SLURMD_NODENAME": "node7"}
    command = [sys.executable, "-m", "megatron_gvpo.cluster.rank", str(file)]
    return subprocess.run(command, env=environment, timeout=120).returncode


FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))"


@pytest.mark.parametrize("disk", ["pass", FULL_DISK], ids=["", "full disk"])
def test_a_rank_that_raises_ends_at_once_and_is_named(disk: str, tmp_path: Path):
    """At once: what a library has left for the end could wait for the other ranks."""
    waits = "import atexit, time; atexit.register(time.sleep, 1000)"
    assert run(f"{waits}\n{disk}\nraise RuntimeError('an error of this rank')", tmp_path) == 1
    said = failures.describe(tmp_path / "logs")
    assert said is not None and said.startswith("first failure: rank 3 on node7 at ")
    words = "it could not write down why" if disk == FULL_DISK else "RuntimeError: an error of this rank"
    assert words in said


def test_a_rank_that_ends_well_is_no_failure(tmp_path: Path):
    assert run("print('done')", tmp_path) == 0
    assert failures.describe(tmp_path / "logs") is None
