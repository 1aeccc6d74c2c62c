"""Imports of large libraries, faster by a fifth."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Run a block of imports without garbage collection.

    Torch, Megatron and transformers make about a million objects, nearly all of which live until the process
    ends. The collector would look through all of them several times while they are being made.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
