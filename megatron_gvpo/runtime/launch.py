"""Starts the ranks of a run on this machine, as torchrun would, and ends them in order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

PATIENCE = 10.0  # seconds that the other ranks have to end by themselves after one has failed


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `python -m megatron_gvpo <arguments>` in `processes` ranks; returns 0 or the first other exit code.

    SIGTERM and SIGUSR1 are passed on to the ranks, which save and exit with 0. torchrun would give them half
    a minute, and would report that as a failure, like wrong input, with a page of its own text.
    """
    environment = _environment(processes)
    command = [sys.executable, "-m", "megatron_gvpo", *arguments]
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        for rank in range(processes):
            numbered = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=numbered))
        return _wait(ranks)
    except KeyboardInterrupt:  # the terminal has sent it to the ranks, too
        return 128 + signal.SIGINT
    finally:
        _end(ranks)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all ranks are done or one has failed; returns the exit code, 128 + n for signal n."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed := [code for code in codes if code]:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.1)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.wait()


def _environment(processes: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
