"""Spoiled configurations through the real command, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.inputs.good_config import GOOD
from helpers.inputs.mutate import mutated
from helpers.programs.forked_command import command
from hypothesis import given, settings
from hypothesis import strategies as st

FUZZ = settings(settings.get_profile("fuzz"))
JOB = ["--nodes", "1", "--ranks-per-node", "1", "--no-gpus", "--dry-run"]


@FUZZ
@given(data=st.data())
def test_slurm(data: st.DataObject, task: Path, tmp_path: Path) -> None:
    """`slurm --dry-run` reads the configuration, makes the checks of `train`, and shows its job."""
    values = data.draw(mutated(yaml.safe_load((task / "run.yaml").read_text()) | {"output_dir": "out"}))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    code, out, err = command(tmp_path, "slurm", "run.yaml", *JOB)
    assert "Traceback" not in err
    if code == 0:
        assert out.startswith("#!") and "megatron" in out
    else:
        assert code == 2 and err.startswith("error: ") and 10 < len(err) < 2200, (code, err)
        assert len(err.splitlines()) <= 21 and "pydantic" not in err


@pytest.mark.parametrize("word", ["", "=", "train", "--nodes", "train.steps=", "\udcff=1", "x" * 5000])
def test_words(word: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    code, _, err = command(tmp_path, "slurm", "run.yaml", word, *JOB)
    assert code == 2 and "error: " in err and "Traceback" not in err
