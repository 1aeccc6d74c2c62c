"""Transformer Engine's own layers, quantizers and optimizer on the emulated GPU: the values of fp64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import on_null_cuda
from helpers.paths import IMPORTS
from helpers.suite.real_parts import used


def errors_on(device: str, folder: Path) -> dict[str, float]:
    """The worker's errors on one such GPU."""
    environment = on_null_cuda.emulated_environment(device=device)
    path = os.pathsep.join([IMPORTS, environment["PYTHONPATH"]])
    result = folder / "errors.json"
    command = [sys.executable, "-W", "ignore", "-m", "helpers.workers.emulated_layers", str(result)]
    done = subprocess.run(
        command,
        env=os.environ | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used("emulated GPU")
    errors: dict[str, float] = json.loads(result.read_text())
    return errors


@pytest.mark.parametrize(("device", "recipes"), [("h100", 2), ("b200", 3)])
def test_layers_have_the_values_of_fp64(device: str, recipes: int, tmp_path: Path) -> None:
    errors = errors_on(device, tmp_path)
    assert sum(name.endswith("experts, out") for name in errors) == recipes
    assert {name: error for name, error in errors.items() if not error <= 1} == {}
