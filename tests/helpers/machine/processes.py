"""Reads about processes that may end meanwhile."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
