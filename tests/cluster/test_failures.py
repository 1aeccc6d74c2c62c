"""A rank under `megatron_gvpo.cli.rank`, and the summary that `megatron_gvpo.cluster.failures` prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from megatron_gvpo.cluster import failures


def run(program: str, folder: Path) -> int:
    """Run as rank 3; returns the exit code."""
    file = folder / "program.py"
    file.write_text(program)
    return run_rank(folder, str(file))


def run_rank(folder: Path, *arguments: str) -> int:
    logs = folder / "logs"
    logs.mkdir()
    environment = {**os.environ, "RANK": "3", "MEGATRON_GVPO_LOGS": str(logs), "SLURMD_NODENAME": "node7"}
    command = [sys.executable, "-m", "megatron_gvpo.cli.rank", *arguments]
    return subprocess.run(command, env=environment, timeout=120).returncode


FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))"


@pytest.mark.parametrize("disk", ["pass", FULL_DISK], ids=["", "full disk"])
def test_a_rank_that_raises_ends_at_once_and_is_named(disk: str, tmp_path: Path):
    """It does not wait for exit handlers of libraries, which could wait for the other ranks."""
    waits = "import atexit, time; atexit.register(time.sleep, 1000)"
    assert run(f"{waits}\n{disk}\nraise RuntimeError('an error of this rank')", tmp_path) == 1
    description = failures.describe(tmp_path / "logs")
    assert description is not None and description.startswith("first failure: rank 3 on node7 at ")
    words = "it could not write down why" if disk == FULL_DISK else "RuntimeError: an error of this rank"
    assert words in description


def test_a_rank_that_ends_before_it_has_a_log_is_named(tmp_path: Path):
    """Its node lacks a file system, or this package, so only its torchrun knows of the failure."""
    (tmp_path / "rank_00001.log").write_text("the other node's rank, which waits\n")
    environment = {**os.environ, "MEGATRON_GVPO_LOGS": str(tmp_path / "nowhere"), "TMPDIR": str(tmp_path)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    with (tmp_path / "node_0.log").open("w") as log:
        command = [*torchrun, "-m", "megatron_gvpo.cli.rank", "train", "run.yaml"]
        assert subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=120).returncode == 1
    description = failures.describe(tmp_path)
    assert description is not None
    assert re.match(r"first failure: rank 0 on \S+ at .*: exit code 1, before it began its log", description)
    assert "FileNotFoundError" in description and "nowhere/rank_00000.log" in description


def test_a_rank_that_ends_well_is_no_failure(tmp_path: Path):
    assert run("print('done')", tmp_path) == 0
    assert failures.describe(tmp_path / "logs") is None


def test_what_one_rank_alone_refuses_is_said(tmp_path: Path):
    """One node does not see the file."""
    assert run_rank(tmp_path, "train", str(tmp_path / "nowhere.yaml")) == 2
    description = failures.describe(tmp_path / "logs")
    assert description is not None and description.startswith("first failure: rank 3 on node7 at ")
    assert "exit code 2" in description and "nowhere.yaml" in description


def test_the_launcher_names_a_killed_rank_and_ends_the_others_at_once(tmp_path: Path):
    """The killed rank cannot say anything, and the others cannot know of it: they may be in a long call.

    After an error they would have PATIENCE, here longer than the test.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, time\n"
        "match os.environ.get('RANK'):\n"
        "    case '0': time.sleep(1000)\n"
        "    case '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    program = (
        "import sys; from megatron_gvpo.core import launch; launch.PATIENCE = 1000.0\n"
        "sys.exit(launch.launch(2, ['--version']))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (137, "rank 1 was killed by SIGKILL: the others are ended\n")
