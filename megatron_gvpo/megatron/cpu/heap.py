"""What PyTorch frees on CPU stays with the process for the next operation, as its CUDA allocator has it.

By default glibc returns a micro-batch's activations to the system at its end. The next one then has every
page mapped and zeroed again, tens of thousands a step: a tenth of the time of a small model's step.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT = 2**30  # bytes at the heap's end; what is freed beyond them goes back at once
_MAPPED = 2**25  # bytes from which on a block is a mapping of its own; glibc allows no more

_libc = ctypes.CDLL(None)
_ours = hasattr(_libc, "mallopt") and hasattr(_libc, "malloc_trim")  # glibc; others keep it themselves


def keep_freed() -> None:
    if _ours:
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        _libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED)


def give_back() -> None:
    """Return all that is free to the system: torch.cuda.empty_cache, for a CPU."""
    if _ours:
        _libc.malloc_trim(0)
