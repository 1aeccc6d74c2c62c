"""Spoiled configurations through the real command, each in a process of its own."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from good_config import GOOD
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import mutated

FUZZ = settings(settings.get_profile("fuzz"))
JOB = ["--nodes", "1", "--ranks-per-node", "1", "--no-gpus", "--dry-run"]


def command(directory: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code (-n: signal n), output and errors of `python -m megatron_gvpo` in a fork of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child uses none of theirs
        child = os.fork()
    if child == 0:
        try:
            _be_the_command(directory, arguments)
        finally:
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, *((directory / name).read_text(errors="replace") for name in ("out", "err"))


def _be_the_command(directory: Path, arguments: tuple[str, ...]) -> None:
    os.chdir(directory)
    sys.stdout, sys.stderr = open("out", "w"), open("err", "w")  # noqa: SIM115 - the process ends
    sys.argv = ["megatron-gvpo", *arguments]
    code: Any = 1
    try:
        runpy.run_module("megatron_gvpo", run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


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
