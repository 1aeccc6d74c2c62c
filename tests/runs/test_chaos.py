"""A run with faults of the kinds that need no server; `make chaos` runs a hundred, with servers, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.machine.debian import install
from helpers.paths import ROOT
from helpers.suite.real_parts import used

sys.path.append(str(ROOT / "benchmarks"))

from lib.chaos.schedules import EMBEDDED, Fault, Schedule
from lib.chaos.suite import Suite

FAULTS = (
    Fault("stop rank", 2, seconds=1.0, victim=1),
    Fault("kill rank", 3, delay=0.1, victim=1),
    Fault("stop reward worker", 3, seconds=0.5),
    Fault("kill reward worker", 4),
    Fault("stop judge", 4, delay=0.2, seconds=0.5),
    Fault("kill judge", 5, delay=0.1, seconds=1.0),
    Fault("fill disk", 6, "saving", seconds=1.0),
    Fault("jump clock", 7, size=-3600.0),
    Fault("tell to stop", 8, delay=0.1),
    Fault("corrupt checkpoint", 9, delay=0.1),
    Fault("lose node", 10, "saving"),
)
# Starts the two ranks of a command as forks, as the launcher of a chaos run does.
LAUNCHER = """
import subprocess, sys
from lib.chaos import starter
from megatron_gvpo.core.launch import launch
subprocess.Popen = starter._ForkedRank
sys.exit(launch(2, ["recipes"]))
"""
KILLED = ("kill rank", "corrupt checkpoint", "lose node")


def test_the_launcher_starts_its_ranks_as_forks() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", LAUNCHER]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\ngvpo ") == 2


@pytest.mark.proof
def test_a_run_survives_a_fault_of_each_kind(tmp_path: Path) -> None:
    """Its metrics and weights equal an undisturbed run's, and its ends are those that are documented."""
    install(["faketime"], ["faketime"])
    assert {fault.kind for fault in FAULTS} == {*EMBEDDED}
    with Suite(tmp_path, None) as suite:
        result = suite.try_schedule(Schedule(0, "embedded", "dp2", ("checkpoint.every=1",), FAULTS))
    assert result["passed"], result["error"]
    used("embedded rollout engine")
    codes = result["exit_codes"]
    assert codes.count(137) == sum(fault.kind in KILLED for fault in FAULTS) and codes[-1] == 0
    assert {*codes} <= {0, 1, 137}, "1: the judge, or the disk"
