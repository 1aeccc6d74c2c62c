"""The head's Triton kernels without a GPU: interpreted, and compiled for a GPU that is absent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.paths import HELPERS


def python(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, because Triton reads TRITON_INTERPRET at its first import."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret))}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


FEW = pytest.param("not proof", id="few")
OTHERS = pytest.param("proof", marks=pytest.mark.proof, id="others")


@pytest.mark.parametrize("cases", [FEW, OTHERS])
def test_the_kernels_compute_what_they_should(cases: str):
    file = HELPERS / "cases" / "triton_head_cases.py"
    done = python("-m", "pytest", "-p", "no:cacheprovider", "-m", cases, str(file), interpret=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "passed" in done.stdout or "[100%]" in done.stdout


def test_a_cpu_without_the_interpreter_is_told():
    code = (
        "import torch; from megatron_gvpo.kernels.linear_logprob import linear_logprob as f; "
        "f(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64), backend='triton')"
    )
    done = python("-c", code)
    assert "ValueError: backend='triton' on a CPU needs TRITON_INTERPRET=1" in done.stderr
