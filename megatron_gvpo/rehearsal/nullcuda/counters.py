"""Reads, in a process on the null CUDA, the counts of calls that it has made to the device so far."""

from __future__ import annotations

import ctypes
import functools


def is_loaded() -> bool:
    """True in a process that was started with the null CUDA."""
    return hasattr(ctypes.CDLL(None), "nullcuda_counter")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.nullcuda_counter.restype = ctypes.c_long
    library.nullcuda_counter_name.restype = ctypes.c_char_p
    library.nullcuda_refused.restype = ctypes.c_char_p
    return library


@functools.cache
def names() -> tuple[str, ...]:
    """The counters' names, as nullcuda.h explains them."""
    collected: list[str] = []
    while (name := _library().nullcuda_counter_name(len(collected))) is not None:
        collected.append(name.decode())
    return tuple(collected)


def read() -> dict[str, int]:
    """All counters since the process began; bytes and FLOPs are counts, too."""
    return {name: int(_library().nullcuda_counter(index)) for index, name in enumerate(names())}


def refused() -> str | None:
    """The name of the last CUDA function that was called and is not supported."""
    name: str = _library().nullcuda_refused().decode()
    return name or None
