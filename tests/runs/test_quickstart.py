"""The quickstart on two tensor-parallel ranks; tests/shipping/test_images.py runs it on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.doc_blocks import ROOT
from helpers.inputs.good_config import SHORT


@pytest.mark.proof  # a minute
def test_two_ranks_run_it(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "examples" / "quickstart" / "run.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    two = ("--nproc", "2", "parallel.tp=2")
    done = subprocess.run(
        [*program, *two, *SHORT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = tmp_path / "runs" / "quickstart"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert "tp: 2" in (run / "config.yaml").read_text()
    assert (run / "hf" / "model.safetensors").is_file()
