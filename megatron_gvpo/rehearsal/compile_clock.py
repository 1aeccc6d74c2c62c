"""Measures the time that torch.compile and Triton take, which a phase of a rehearsal does not count."""

from __future__ import annotations

import time
from typing import Any


class CompileClock:
    """Counts the seconds of compilation in this process since `install`. The compilers call its methods.

    A run compiles once, and a machine's cache keeps kernels from one run to the next. So with an empty cache
    a phase takes longer, for a reason that is not the configuration's.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin: float | None = None  # the start of torch.compile's work, while that goes on

    def install(self) -> None:
        """Register this clock with torch.compile and Triton until the process ends."""
        from torch._dynamo.callback import callback_handler
        from triton import knobs

        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        knobs.compilation.listener = self._add_kernel

    def _start(self, _: Any) -> None:
        self._begin = time.perf_counter()

    def _end(self, _: Any) -> None:
        if self._begin is not None:
            self.seconds += time.perf_counter() - self._begin
        self._begin = None

    def _add_kernel(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Count a kernel that Triton has compiled, unless torch.compile did it, which is counted already."""
        if not cache_hit and self._begin is None:
            self.seconds += times.total / 1e6  # from microseconds
