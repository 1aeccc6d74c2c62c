"""Ends a process when its parent dies, however the parent dies."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before a fork, after which little is safe


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; call it first in a new child.

    `parent`: the process that started it. Where that is gone by now, this process ends at once.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
