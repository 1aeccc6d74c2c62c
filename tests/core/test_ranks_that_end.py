"""Ranks of one machine: a run is done when every rank has done its work, whatever their exit codes are."""

from pathlib import Path

import pytest

from megatron_gvpo.core import launch

RANK = """
import ctypes, os, sys, time
from megatron_gvpo.core.launch import report

if os.environ["RANK"] == "1":
    {does}
elif {waits}:
    time.sleep(60)
report(int(os.environ["RANK"]))
"""


@pytest.mark.parametrize(
    ("does", "code", "message"),
    [
        ("ctypes.CDLL(None)._exit(0)", 1, "rank 1 ended with exit code 0 before its work was done"),
        ("ctypes.CDLL(None).exit(0)", 1, "rank 1 ended with exit code 0 before its work was done"),
        ("os.execv('/bin/true', ['true'])", 1, "rank 1 ended with exit code 0 before its work was done"),
        ("ctypes.CDLL(None)._exit(3)", 3, ""),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_ends_early_fails_the_run(
    does: str,
    code: int,
    message: str,
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The exit code 0 of a call in C was taken for a finished run, whose other ranks waited for the rank."""
    file = tmp_path / "rank.py"
    file.write_text(RANK.format(does=does, waits=waits))
    monkeypatch.setattr(launch, "program", [str(file)])
    monkeypatch.setattr(launch, "PATIENCE", 0.5)
    assert launch.launch(2, []) == code
    assert message in capfd.readouterr().err


def test_ranks_that_have_done_their_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rank.py"
    file.write_text(RANK.format(does="pass", waits=False))
    monkeypatch.setattr(launch, "program", [str(file)])
    assert launch.launch(3, []) == 0


REFUSED = "from megatron_gvpo.cli.terminal import refuse; sys.exit(refuse(ValueError('a line is wrong')))"


def test_an_error_that_one_rank_alone_has_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the first rank prints what it refuses, and here it has nothing to refuse."""
    file = tmp_path / "rank.py"
    file.write_text(RANK.format(does=REFUSED, waits=True))
    monkeypatch.setattr(launch, "program", [str(file)])
    monkeypatch.setattr(launch, "PATIENCE", 0.5)
    assert launch.launch(2, []) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error on node ") and line.endswith("(rank 1): a line is wrong")


def test_an_error_that_all_ranks_have_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rank.py"
    file.write_text("import os, sys\n" + REFUSED)
    monkeypatch.setattr(launch, "program", [str(file)])
    assert launch.launch(3, []) == 2
    assert capfd.readouterr().err == "error: a line is wrong\n"
