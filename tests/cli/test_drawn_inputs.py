"""A draw of the inputs in tests/bad_input, which gives the command line more than 700 of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.paths import ROOT

RUN = [sys.executable, str(ROOT / "tests" / "bad_input" / "run.py")]


def test_a_draw_of_bad_inputs_is_taken_well():
    done = subprocess.run(
        [*RUN, "--share", "0.01", "--seed", "3"], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, "\n".join(
        line for line in done.stdout.splitlines() if not line.startswith("good")
    )


@pytest.mark.proof
def test_all_bad_inputs_are_taken_well():
    done = subprocess.run(RUN, capture_output=True, text=True, timeout=7000)
    assert done.returncode == 0, "\n".join(
        line for line in done.stdout.splitlines() if not line.startswith("good")
    )
