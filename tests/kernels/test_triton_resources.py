"""The head's Triton kernels fit an A100, an H100 and a B200: docs/explanation/head.md has what they take.

`pytest --write-tables tests/kernels/test_triton_resources.py` writes the table anew. Another Triton may give
other numbers; the limits of the GPUs hold for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from helpers.paths import HELPERS, ROOT
from helpers.suite.doc_tables import Hold

FILE = ROOT / "docs" / "explanation" / "head.md"
GPUS = {80: "A100 (sm_80)", 90: "H100 (sm_90)", 100: "B200 (sm_100)"}
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that one block may have (CUDA's guide)
THREADS, REGISTERS = 256, 65536  # of a block of 8 warps, and of a multiprocessor


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    """In a new process, because Triton reads TRITON_INTERPRET at its first import."""
    command = [sys.executable, str(HELPERS / "programs" / "triton_compiled.py"), *map(str, GPUS)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(kernels: list[dict[str, Any]]) -> str:
    lines = [
        "| GPU | kernel | entropy | registers a thread | spilled bytes | shared KiB |",
        "|---|---|---|---|---|---|",
    ]
    for made in kernels:
        cells = [GPUS[made["capability"]], made["kernel"], "yes" if made["entropy"] else "no"]
        cells += [str(made["registers"]), str(made["stack"]), f"{made['shared'] / 1024:.3g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_every_gpu_can_run_the_kernels(kernels: list[dict[str, Any]]) -> None:
    """They fit, hardly spill, and load 16 bytes at once."""
    assert len(kernels) == 4 * len(GPUS)
    for made in kernels:
        assert made["shared"] <= SHARED[made["capability"]], made
        assert made["registers"] * THREADS <= REGISTERS, made
        assert made["stack"] <= 16, made
        assert made["wide"], made


def test_the_table_is_current(kernels: list[dict[str, Any]], hold_current: Hold) -> None:
    hold_current(FILE, {"resources": lambda: table(kernels)})
