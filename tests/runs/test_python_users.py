"""Python's entry points refuse what the command line refuses, before anything is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.tiny_run import configure

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.training import conversion
from megatron_gvpo.training.evaluate import evaluate


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.eval=null", "data.eval is missing: it names the held-out prompts"),
        ("parallel.tp=2", "parallel.tp"),
        ("rewards.components=[{name: x, function: 'gone.py:f'}]", "there is no file gone.py"),
    ],
)
def test_eval(task: Path, tmp_path: Path, override: str, problem: str) -> None:
    """Fails on the old code: it loaded the model, and had no metrics where there were no prompts."""
    before = dist.is_initialized()  # by another test of this process
    with pytest.raises(ConfigError, match=problem):
        evaluate(configure(task, tmp_path / "run", override), resume=False)
    assert dist.is_initialized() == before


def test_export_and_conversion_keep_what_is_there(task: Path, tmp_path: Path) -> None:
    """Fails on the old code, which replaced the directory."""
    before = dist.is_initialized()
    config = configure(task, tmp_path / "run")
    (existing_file := tmp_path / "full" / "mine").parent.mkdir()
    existing_file.write_text("x")
    with pytest.raises(ConfigError, match=r"full: this directory is not empty"):
        conversion.checkpoint_to_hugging_face(config, existing_file.parent)
    with pytest.raises(ConfigError, match=r"full: this directory is not empty"):
        conversion.to_megatron(task / "model", existing_file.parent)
    with pytest.raises(ConfigError, match=r"parallel\.tp"):
        conversion.checkpoint_to_hugging_face(
            configure(task, tmp_path / "run", "parallel.tp=2"), tmp_path / "o"
        )
    assert existing_file.read_text() == "x" and dist.is_initialized() == before


def test_importing_the_trainer_says_nothing() -> None:
    """Fails on the old code: megatron-core warned of Apex and Transformer Engine. Other warnings stay."""
    code = "from megatron_gvpo import Trainer; import warnings; warnings.warn('mine')"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert "Apex" not in done.stderr and done.stderr.count("Warning") == 1 and "mine" in done.stderr
