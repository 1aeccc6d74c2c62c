"""Starts the ranks of a run on this machine, as torchrun would, and ends them in order."""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import Any

from megatron_gvpo.core.environment import die_with_parent
from megatron_gvpo.core.signals import handled_by, stopping_signals

# Seconds in which the other ranks must end by themselves: after one failed with an error, which they may also
# report; and after a signal killed one, of which they have no knowledge.
PATIENCE, PATIENCE_AFTER_KILL = 10.0, 1.0
# Linux gives ports from 32768 on to outgoing connections. Such a connection could take a port before the
# process listens on it, or while the process restarts.
PORTS = range(20_000, 30_000)
# The environment variable with the file descriptor of a pipe to this process. A rank writes its number there
# when its command is done. If the command fails with an error that the first rank may have as well, the rank
# writes the error as JSON, and only the first rank prints it.
REPORTS = "MEGATRON_GVPO_REPORTS"
_LONGEST = 600  # characters of such an error: a pipe takes so much at once
# The arguments of Python in each rank, before those of the command. On emulated GPUs it is another module.
program = ["-m", "megatron_gvpo"]


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `python <program> <arguments>` in `processes` ranks; returns 0 or the first other exit code.

    The signals that ask a run to stop are passed on to the ranks, which save and exit with 0. torchrun would
    give them half a minute, and would report that as a failure, like wrong input, with a page of its text.
    Each rank leads a process group of its own, so that Ctrl-C reaches it once, through this process. A second
    Ctrl-C ends the ranks at once. A rank that a signal killed is named on stderr, because it could not print
    anything itself. A rank that ended with 0 before its command was done, as by `_exit(0)` in a C library, is
    also named, and counts as failed. Ranks are killed when this process is.
    """
    descriptor, descriptor_of_ranks = os.pipe()
    os.set_blocking(descriptor, False)
    reports = _Reports(descriptor)
    environment = _environment(processes) | {REPORTS: str(descriptor_of_ranks)}
    ranks: list[subprocess.Popen[bytes]] = []
    patience = PATIENCE
    presses = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += number == signal.SIGINT
        for rank in ranks:
            rank.send_signal(signal.SIGKILL if presses > 1 else number)

    with handled_by(forward, stopping_signals()):
        try:
            for rank in range(processes):
                ranks.append(_start(rank, arguments, environment, descriptor_of_ranks))
            failed, code = _wait(ranks, reports)
            if presses > 1:
                return 128 + signal.SIGINT
            if code < 0:
                patience = PATIENCE_AFTER_KILL
                name = signal.Signals(-code).name
                print(
                    f"rank {failed} was killed by {name}: the others are ended", file=sys.stderr, flush=True
                )
            return code if code >= 0 else 128 - code
        finally:
            _end(ranks, patience)
            reports.read()
            # The first rank prints its own errors; an error of another rank alone is printed here.
            if reports.errors and (not ranks or ranks[0].returncode <= 0):
                print(reports.errors[0], file=sys.stderr, flush=True)
            os.close(descriptor)
            os.close(descriptor_of_ranks)


def _start(
    rank: int, arguments: Sequence[str], environment: Mapping[str, str], descriptor: int
) -> subprocess.Popen[bytes]:
    """Start a rank, which ends with this process and may write to `descriptor`, in its own process group."""
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        process_group=0,
        preexec_fn=partial(die_with_parent, os.getpid()),
        pass_fds=[descriptor],
    )


class _Reports:
    """Messages of the ranks from a pipe: `done`, the numbers of those whose work is done, and `errors`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._text = descriptor, b""

    def read(self) -> None:
        with suppress(BlockingIOError):
            while text := os.read(self._descriptor, 2**16):
                self._text += text

    @property
    def done(self) -> set[int]:
        return {value for value in self._values() if isinstance(value, int)}

    @property
    def errors(self) -> list[str]:
        return [value for value in self._values() if isinstance(value, str)]

    def _values(self) -> list[Any]:
        values = []
        for line in self._text.splitlines():
            with suppress(ValueError):  # users' code wrote to this descriptor
                values.append(json.loads(line))
        return values


def report(value: int | str) -> None:
    """Report to the process that started this rank, if any, that the rank is done, or its error."""
    if descriptor := os.environ.get(REPORTS, ""):
        value = value[:_LONGEST] if isinstance(value, str) else value
        with suppress(OSError):  # users' code may have closed it; the rank then counts as failed
            os.write(int(descriptor), f"{json.dumps(value)}\n".encode())


def _wait(ranks: Sequence[subprocess.Popen[bytes]], reports: _Reports) -> tuple[int, int]:
    """Wait until all ranks are done or one has failed; returns that rank and its exit code, -n for signal n.

    A killed rank is returned first, because others may have failed as a consequence.
    """
    while True:
        codes = [rank.poll() or 0 for rank in ranks]
        if any(codes):
            killed = [(i, code) for i, code in enumerate(codes) if code < 0]
            return killed[0] if killed else next((i, code) for i, code in enumerate(codes) if code)
        reports.read()
        ended = {i for i, rank in enumerate(ranks) if rank.returncode is not None}
        if early := ended - reports.done:
            print(
                f"rank {min(early)} ended with exit code 0 before its work was done, as by a call of exit() "
                "in a library: the others are ended",
                file=sys.stderr,
                flush=True,
            )
            return min(early), 1
        if len(ended) == len(ranks):
            return 0, 0
        time.sleep(0.1)


def _end(ranks: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    deadline = time.monotonic() + patience
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.wait()


def _environment(processes: int) -> dict[str, str]:
    [port] = free_ports(1, "127.0.0.1")
    return {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }


def free_ports(count: int, host: str) -> list[int]:
    """Find PORTS of `host` that are free at the moment. Raises OSError for another machine's host."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with ExitStack() as opened:
        ports: list[int] = []
        for port in secrets.SystemRandom().sample(PORTS, len(PORTS)):
            if len(ports) == count:
                return ports
            try:
                opened.enter_context(socket.socket(family)).bind((host, port))
                ports.append(port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
    raise OSError(errno.EADDRINUSE, f"{count} ports from {PORTS.start} to {PORTS.stop - 1} are not free")
