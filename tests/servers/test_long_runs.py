"""Long runs on real servers, by the benchmarks that record them in benchmarks/results/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.servers.real_servers import ENGINES
from helpers.suite.real_parts import used

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 3600.0

pytestmark = pytest.mark.proof  # in `make test`: test_faults.py and test_weight_stream.py


def run(engine: str, script: str, *arguments: str) -> str:
    """Run a benchmark; returns its output. It fails, by its exit status, where what it shows is not so."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    failed = [line for line in done.stdout.splitlines() if '"passed": false' in line]
    assert done.returncode == 0, "\n".join([*failed, done.stdout[-6000:], done.stderr[-3000:]])
    used(f"{engine} server")
    return done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_random_schedules_of_faults(engine: str) -> None:
    """In all of them every group is complete, and from the weights of its step.

    The committed results have 20 schedules of each engine, a minute or more each.
    """
    output = run(engine, "rollout_faults.py", "--engine", engine, "--schedules", "4")
    assert "4 of 4 schedules passed" in output


def test_fifty_delta_pushes_are_exact() -> None:
    """Afterwards the server's tensors equal, byte for byte, those that it loads from files."""
    assert '"bit_exact": true' in run("sglang", "delta_steps.py")
