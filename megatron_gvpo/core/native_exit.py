"""Notices that a library ends this process by C's exit() before the command is done.

The exit code would be the library's, often 0, as if the command had done its work.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_exit = os._exit  # os._exit is replaced for users' code


@contextmanager
def refusing_native_exit() -> Iterator[None]:
    """End the process with exit code 1 and a message where C's exit() is called in the block.

    This does not apply to processes that the block has forked, nor to C's `_exit()`, which cannot be noticed.
    """
    process, library = os.getpid(), ctypes.CDLL(None)
    if not hasattr(library, "__cxa_finalize"):
        yield  # the C library is not glibc
        return

    def leave(_: int | None) -> None:
        if os.getpid() != process or is_done:
            return
        with suppress(OSError, ValueError):
            text = "error: this process was ended before its work was done, by a call of exit() in a library"
            print(text, file=sys.stderr, flush=True)
            sys.stdout.flush()
        _exit(1)

    is_done, handler = False, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(leave)
    mark = ctypes.byref(ctypes.c_byte())  # identifies the handler, to remove it
    library.__cxa_atexit(handler, None, mark)
    try:
        yield
    finally:
        is_done = True
        library.__cxa_finalize(mark)  # calls the handler and forgets it
