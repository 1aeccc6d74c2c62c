"""Ctrl-C, a lost terminal and `nohup`, with real processes on a terminal of their own."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from helpers.tiny_run import SHORT

from megatron_gvpo.cli import main
from megatron_gvpo.runs.existing_run import newest_step

STEPS = ("train.steps=100000", "algorithm=gvpo", *SHORT)
SAVED = (
    r"stopped on request; the checkpoint is complete \(.*/step_\d+\): continue with `train \.\.\. --resume`"
)


@contextmanager
def terminal(*command: str) -> Iterator[tuple[psutil.Popen, int]]:
    """Run `python -m megatron_gvpo COMMAND` as the foreground job of a terminal."""
    screen, tty = pty.openpty()
    process = psutil.Popen(
        [sys.executable, "-c", FOREGROUND, *command],
        stdin=tty,
        stdout=tty,
        stderr=tty,
        env=os.environ,
        preexec_fn=hear_hangups,
    )
    os.close(tty)
    try:
        yield process, screen
    finally:
        family = [process, *process.children(recursive=True)] if process.is_running() else []
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        with suppress(OSError):
            os.close(screen)


def hear_hangups() -> None:
    """Undo in a new process what nohup did, if it started these tests: that SIGHUP is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


FOREGROUND = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "megatron_gvpo", *sys.argv[1:]])
"""


def wait_for(condition: Callable[[], object], process: psutil.Popen, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def rest(terminal: int) -> str:
    """The output until the terminal has no process any more."""
    text = b""
    with suppress(OSError):
        while block := os.read(terminal, 1 << 16):
            text += block
    return text.decode(errors="replace")


def trained(out: Path, steps: int = 2) -> Callable[[], bool]:
    return lambda: (
        (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_bytes().splitlines()) >= steps
    )


def arguments(task: Path, out: Path, *more: str) -> list[str]:
    return ["train", str(task / "run.yaml"), f"output_dir={out}", "logging.progress=lines", *STEPS, *more]


def test_ctrl_c_saves_on_all_ranks_and_meanwhile_the_directory_is_locked(task, tmp_path, capsys):
    """The terminal sends the signal to the launcher and would send it to the ranks; they get it once."""
    words = arguments(task, tmp_path / "run", "--nproc=2")
    with terminal(*words) as (process, screen):
        wait_for(trained(tmp_path / "run"), process)
        before = (tmp_path / "run" / "config.yaml").read_bytes()
        for how in (["--overwrite"], ["--resume=auto"]):
            assert main([*words[:-1], "train.seed=7", *how]) == 2
            assert re.search(
                r"a run on \S+ \(process \d+, since .*\) is writing there", capsys.readouterr().err
            )
        assert (tmp_path / "run" / "config.yaml").read_bytes() == before
        os.write(screen, b"\x03")
        output = rest(screen)
        assert process.wait(300) == 0, output
    assert output.count("Ctrl-C: the run saves after this step") == 1
    assert len(re.findall(SAVED, output)) == 1 and "Traceback" not in output
    assert newest_step(tmp_path / "run") is not None
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_second_ctrl_c_ends_at_once_with_all_that_was_started(task, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import pathlib, time\n\ndef reward(prompt, rollout):\n"
        "    pathlib.Path(__file__).with_name('asked').touch()\n    time.sleep(1000)\n    return 0.0\n"
    )
    reward = f'rewards.components=[{{"name": "slow", "function": "{slow}:reward"}}]'
    words = arguments(task, tmp_path / "run", reward, "rewards.timeout=2000")
    with terminal(*words) as (process, screen):
        wait_for((tmp_path / "asked").exists, process)
        started = process.children(recursive=True)
        os.write(screen, b"\x03")
        output = b""
        while b"Ctrl-C: the run saves after this step" not in output:
            output += os.read(screen, 1 << 16)
        assert process.poll() is None, "it waits for the step"
        os.write(screen, b"\x03")
        assert process.wait(120) == -signal.SIGINT
        _, alive = psutil.wait_procs(started, 60)
        assert alive == []
    assert newest_step(tmp_path / "run") is None


def test_a_killed_launcher_takes_its_ranks_along(task, tmp_path):
    """Fails on the old code, where the ranks went on training, and held the lock on the directory."""
    process = start(arguments(task, tmp_path / "run", "--nproc=2"))
    wait_for(lambda: len(process.children()) == 2, process)
    ranks = process.children()
    try:
        time.sleep(1.0)
        process.kill()
        _, alive = psutil.wait_procs(ranks, 60)
        assert alive == []
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()


@pytest.mark.proof  # the test above sends the other signal to the same handler
def test_a_lost_terminal_saves(task, tmp_path):
    with terminal(*arguments(task, tmp_path / "run")) as (process, screen):
        wait_for(trained(tmp_path / "run"), process)
        os.close(screen)
        assert process.wait(120) in (0, None)
    assert newest_step(tmp_path / "run") is not None


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_before_training_nothing_is_written(task, tmp_path, sent, code):
    process = start(arguments(task, tmp_path / "run"))
    wait_for(lambda: handles(process.pid, sent), process)
    process.send_signal(sent)
    _, error = process.communicate(timeout=300)
    assert process.returncode == code
    assert error == "stopped on request before training began; nothing was written\n"
    assert not (tmp_path / "run").exists()


def test_what_nohup_ignores_stays_ignored_and_a_closed_pipe_ends_no_run(task, tmp_path):
    process = start(arguments(task, tmp_path / "run"), "nohup")
    wait_for(trained(tmp_path / "run", 1), process)
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    steps = len((tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines())
    wait_for(trained(tmp_path / "run", steps + 3), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    assert newest_step(tmp_path / "run") is not None


def start(words: Sequence[str], *before: str) -> psutil.Popen:
    command = [*before, sys.executable, "-m", "megatron_gvpo", *words]
    return psutil.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_hangups,
    )


def handles(pid: int, number: signal.Signals) -> bool:
    (caught,) = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    python = signal.SIGINT  # Python has a handler of its own for it: wait for another one of ours
    return all(int(caught, 16) >> (n - 1) & 1 for n in {number, signal.SIGTERM, python})
