"""A user's mistakes, and parts that a machine lacks: one line and exit code 2; nothing is left behind."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers import on_null_cuda
from helpers.paths import ROOT

from megatron_gvpo.cli import main
from megatron_gvpo.rehearsal import process, transformer_engine
from megatron_gvpo.rehearsal.nullcuda import build
from megatron_gvpo.rehearsal.process import rehearsal_folder

COLOCATED = ["rollout.engine=vllm", "rollout.servers.colocated=true", "rollout.weights.transport=shared"]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    file = on_null_cuda.write_model(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def refuse(*arguments: str) -> str:
        try:
            code = main(["rehearse", str(file), *arguments])
        except SystemExit as end:  # of the parser of the command line
            code = int(end.code or 0)
        printed = capsys.readouterr()
        assert code == 2 and printed.out == ""
        [line] = printed.err.splitlines()
        assert list(temporary.iterdir()) == []
        return line

    return refuse


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "gtx970"], "--gpu gtx970: unknown; known are h100, h200, h800, a100, b200"),
        (["--world", "6", "parallel.tp=4"], r"6 process(es) cannot hold parallel.tp=4"),
        (["--world", "0"], "--world 0: must be from 1"),
        (["--rank", "8"], "--rank 8: --world 8 has the ranks 0 to 7"),
        (["--rank", "-1"], "--rank -1: --world 8 has the ranks 0 to 7"),
        (["--rank", "1", "--ranks", "all-kinds"], "--rank 1 and --ranks all-kinds: give one of them"),
        (["--ranks", "some"], "argument --ranks: invalid choice: 'some' (choose from"),
        (["--world", "x"], "argument --world: 'x': expected a whole number"),
        (["--memory", "2"], "--memory 2.0: too small, 2.7 GiB would do"),
        (["--memory", "2.6"], "--memory 2.6: too small, 2.7 GiB would do"),
        (["--memory", "6.6", *COLOCATED], "--memory 6.6: too small, 6.7 GiB would do"),
        (["--memory", "nan"], "argument --memory: 'nan': expected a number"),
        (["--micro-batches", "0"], "--micro-batches 0: must be at least 1"),
        (
            ["model.path=models/Llama-9"],
            "model.path=models/Llama-9: no config.json there, and not a known model",
        ),
        (["parallel.tp=3"], "parallel.tp=3"),
        (["parallel.typo=3"], "parallel.typo"),
        (["--gpu", "a100"], "install flash-attn"),
        (["train.head_backend=quack"], "a rehearsal has no stand-in for QuACK's product"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(refused, arguments: list[str], words: str) -> None:
    line = refused(*arguments)
    assert line.startswith("error: ")
    assert words in line


def test_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "--world", "8"]) == 2
    assert "no configuration file given" in capsys.readouterr().err


def test_a_torch_without_cuda(refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    monkeypatch.setattr(build, "site_packages", lambda: tmp_path)
    monkeypatch.setattr(transformer_engine, "find", lambda: None)
    assert "is a build without CUDA (libc10_cuda.so is missing): install PyPI's torch" in refused()


def test_no_transformer_engine(refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "`megatron-gvpo rehearse --build` compiles it once" in refused()
    assert not (tmp_path / "cache").exists()


def test_no_compiler(refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_null_cuda.environment()
    installation, include = transformer_engine.find(), build.headers()
    monkeypatch.setattr(transformer_engine, "find", lambda: installation)
    monkeypatch.setattr(build, "headers", lambda: include)
    monkeypatch.setattr(build, "cache", lambda: tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gcc and nm are needed to compile, and not found: apt-get install g++ binutils" in refused()


def test_no_room_for_the_reservation(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    on_null_cuda.environment()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(process.mmap, "mmap", refuse)
    line = refused()
    assert "no room to reserve 73 GiB of address space" in line and "ulimit -v" in line
    assert mmap.mmap is refuse


def test_a_run_refuses_the_null_cuda(tmp_path: Path) -> None:
    """A user who still has LD_PRELOAD from an experiment would train on nothing, and see a GPU at work."""
    variables = on_null_cuda.environment()
    file = on_null_cuda.write_model(tmp_path)
    for command in ("train", "eval", "check"):
        run = [sys.executable, "-m", "megatron_gvpo", command, str(file)]
        environment = {**os.environ, "LD_PRELOAD": variables["LD_PRELOAD"]}
        done = subprocess.run(run, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 2
        assert "null CUDA of a rehearsal, which computes nothing: unset LD_PRELOAD" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.proof)])
def test_a_command_that_is_killed_leaves_no_rank(tmp_path: Path, number: signal.Signals) -> None:
    on_null_cuda.environment()
    file, temporary = on_null_cuda.write_model(tmp_path), tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "megatron_gvpo", "rehearse", str(file), "--world", "2"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    started = subprocess.Popen(
        command, env=environment, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        # The process that imports the libraries, and the rank, which it forks.
        _wait_until(lambda: len(_of_session(started.pid)) >= 3, "no rank was forked")
        started.send_signal(number)
        assert started.wait(timeout=60) == (128 + number if number == signal.SIGTERM else -number)
        _wait_until(lambda: not _of_session(started.pid), "a rank goes on")
        # Nothing can clean up after SIGKILL: the folder of headers stays.
        assert bool(list(temporary.iterdir())) == (number == signal.SIGKILL)
    finally:
        for pid in _of_session(started.pid):
            os.kill(pid, signal.SIGKILL)
        started.wait(timeout=60)


def _wait_until(condition: Callable[[], bool], otherwise: str, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.1)


def _of_session(session: int) -> list[int]:
    """The ids of the session's running processes."""
    processes = psutil.process_iter()
    return [one.pid for one in processes if _session(one) == session]


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def test_the_folder_of_a_killed_rehearsal_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os\nfrom megatron_gvpo.rehearsal.process import rehearsal_folder\n"
    kill = "with rehearsal_folder() as folder: os.kill(os.getpid(), 9)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", program + kill], env=environment).returncode == -9
    [killed] = tmp_path.iterdir()
    (foreign := tmp_path / "rehearsal-notes").mkdir()
    with rehearsal_folder() as first, rehearsal_folder() as second:
        assert {*tmp_path.iterdir()} == {foreign, first, second} and killed not in (first, second)
    assert [*tmp_path.iterdir()] == [foreign]
