"""Starts `megatron-gvpo` commands from a process that has imported the libraries already.

A start of two ranks costs twenty seconds of processor time for imports alone, and a chaos schedule has
several starts. `Starter` keeps a process that has imported everything; it forks for every command, and the
command's ranks are forks, too. Everything else is the package's own code: its command line, its launcher, its
`__main__`.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[3]
SECOND_NODE = "CHAOS_SECOND_NODE"  # the variable that puts rank 1 on the node of this process


def kill_session(leader: int) -> None:
    """Kill all processes of the session, its leader first: the launcher and its ranks, which lead groups."""
    for pid in [leader, *psutil.pids()]:
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


class Command:
    """A command that runs in a session of its own."""

    def __init__(self, pid: int, starter: Starter) -> None:
        self.pid, self._starter = pid, starter

    def poll(self) -> int | None:
        """Return the exit code (128 + n for signal n); None while the command runs."""
        self._starter.read()
        ended = self._starter.ended.get(self.pid)
        return None if ended is None else int(ended["code"])

    @property
    def processor_seconds(self) -> float:
        """Processor time of the command and of the children that it waited for, once it has ended."""
        return float(self._starter.ended[self.pid]["processor"])

    def end(self) -> None:
        """Kill what is left of the command's session, as Slurm does at the end of a job step."""
        kill_session(self.pid)


class Starter:
    """A process that has imported the libraries, with `environment` on top of this process's own."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.ended: dict[int, dict[str, Any]] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        )
        self._lines = b""
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Command:
        """Run `megatron-gvpo ARGUMENTS` with `environment` on top; its output is appended to `log`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"arguments": list(arguments), "log": str(log), "environment": dict(environment)}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        while (answer := self._next()) is None or "pid" not in answer:
            if answer is not None:
                self.ended[answer["ended"]] = answer
            elif self._process.poll() is not None:
                raise RuntimeError("the process that starts commands has ended")
            else:
                select.select([self._process.stdout], [], [], 0.1)
        return Command(answer["pid"], self)

    def read(self) -> None:
        """Read which commands have ended, and their exit codes."""
        while (answer := self._next()) is not None:
            self.ended[answer["ended"]] = answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _next(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        self._lines += self._process.stdout.read() or b""
        line, newline, rest = self._lines.partition(b"\n")
        if not newline:
            return None
        self._lines = rest
        answer: dict[str, Any] = json.loads(line)
        return answer


class _ForkedRank:
    """Replaces the launcher's subprocess.Popen of a rank by a fork that runs the same module."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        process_group: int,
        preexec_fn: Callable[[], object],
        pass_fds: Sequence[int],  # a fork has all descriptors
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, process_group)
            preexec_fn()
            subprocess.Popen = _popen  # type: ignore[misc]
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)  # as after exec
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(env)
            if SECOND_NODE in env and env["RANK"] == "1":
                _move_to(int(env[SECOND_NODE]))
            _run_module(command[3:])

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


_popen = subprocess.Popen


def _move_to(pid: int) -> None:
    """Become the first rank of the node of process `pid`, whose mount namespace has its own shared memory."""
    os.environ["LOCAL_RANK"] = "0"
    here = os.getcwd()
    os.unshare(os.CLONE_FS)
    os.setns(os.pidfd_open(pid), os.CLONE_NEWNS)
    os.chdir(here)


def _run_module(arguments: Sequence[str]) -> None:
    """Run `python -m megatron_gvpo ARGUMENTS` in this process, to its end."""
    sys.argv = ["megatron_gvpo", *arguments]
    code: Any = 0
    try:
        runpy.run_module("megatron_gvpo", run_name="__main__", alter_sys=False)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _import() -> None:
    """Import the modules that a rank imports. No import may start a thread, because forks follow."""
    for module in (
        "megatron_gvpo.cli",
        "megatron_gvpo.checks.preflight",
        "megatron_gvpo.core.launch",
        "megatron_gvpo.training.trainer",
        "megatron_gvpo.training.callbacks",
    ):
        importlib.import_module(module)
    importlib.import_module("megatron_gvpo.megatron.cpu.bridge").import_bridge()


def _main() -> None:
    """Fork for each command on the standard input; write pids and exit codes to the standard output."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    _import()
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([0], [], [], 0.02 if running else None)
        for pid in list(running):
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                # of the ranks, too: the command has waited for them
                processor = used.ru_utime + used.ru_stime
                answer = {"ended": pid, "code": code if code >= 0 else 128 - code, "processor": processor}
                answers.write(json.dumps(answer).encode() + b"\n")
        if ready:
            if not (line := sys.stdin.buffer.readline()):
                return
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                answers.close()
                os.environ.update(order["environment"])
                _become(order["arguments"], order["log"])
            running.add(pid)
            answers.write(json.dumps({"pid": pid}).encode() + b"\n")


def _become(arguments: Sequence[str], log: str) -> None:
    """Become the command's launcher, whose ranks are forks."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, descriptor)
    subprocess.Popen = _ForkedRank  # type: ignore[assignment,misc]
    _run_module(arguments)


if __name__ == "__main__":
    _main()
