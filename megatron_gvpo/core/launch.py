"""Starts the ranks of a run on this machine, as torchrun would, and ends them in order."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType

from megatron_gvpo.core.environment import die_with_parent
from megatron_gvpo.core.signals import handled_by, stopping_signals

# Seconds that the other ranks have to end by themselves: after one failed with an error, which they may be
# about to report too; and after a signal killed one, which they cannot know.
PATIENCE, PATIENCE_AFTER_KILL = 10.0, 1.0
# Linux gives ports from 32768 on to outgoing connections. Such a connection could take a port before the
# process listens on it, or while the process restarts.
PORTS = range(20_000, 30_000)
# The arguments of Python in each rank, before those of the command. On emulated GPUs it is another module.
program = ["-m", "megatron_gvpo"]


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `python <program> <arguments>` in `processes` ranks; returns 0 or the first other exit code.

    The signals that ask a run to stop are passed on to the ranks, which save and exit with 0. torchrun would
    give them half a minute, and would report that as a failure, like wrong input, with a page of its text.
    Each rank leads a process group of its own, so that Ctrl-C reaches it once, through this process. A second
    Ctrl-C ends the ranks at once.
    A rank that a signal killed is named on stderr, because it could not say anything itself. Ranks are killed
    when this process is.
    """
    environment = _environment(processes)
    command = [sys.executable, *program, *arguments]
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
                numbered = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                begin = partial(die_with_parent, os.getpid())
                ranks.append(subprocess.Popen(command, env=numbered, process_group=0, preexec_fn=begin))
            failed, code = _wait(ranks)
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


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Wait until all ranks are done or one has failed; returns that rank and its exit code, -n for signal n.

    A killed rank goes before others, which may have failed because it was gone.
    """
    while True:
        codes = [rank.poll() or 0 for rank in ranks]
        if any(codes):
            killed = [(i, code) for i, code in enumerate(codes) if code < 0]
            return killed[0] if killed else next((i, code) for i, code in enumerate(codes) if code)
        if all(rank.returncode is not None for rank in ranks):
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
