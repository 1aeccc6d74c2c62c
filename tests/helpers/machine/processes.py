"""Reads about processes that may end at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def having(marker: str) -> Iterator[int]:
    """Processes with `marker` in their environment: the one that was started with it, and its descendants."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in environ.read_bytes():
                yield int(environ.parent.name)
        except OSError:
            continue


def left_having(marker: str, seconds: float = 60.0) -> list[int]:
    """Wait until no process has `marker` in its environment, or the time is over; return those that have it.

    A process that was killed takes a moment to end, and more on a busy machine.
    """
    soon(lambda: not any(having(marker)), seconds)
    return list(having(marker))


def soon(is_so: Callable[[], object], seconds: float = 60.0) -> bool:
    """True if the condition becomes true within that time."""
    deadline = time.monotonic() + seconds
    while not (answer := is_so()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(answer)
