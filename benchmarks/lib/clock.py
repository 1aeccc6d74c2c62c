"""Measures calls: processor and wall seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Clock:
    """Processor and wall seconds of the calls that it wraps; `processor`: the clock of processor time."""

    def __init__(self, processor: Callable[[], float] = time.process_time) -> None:
        self._processor = processor
        self.cpu = self.wall = 0.0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = self._processor(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.cpu += self._processor() - cpu
                self.wall += time.perf_counter() - wall

        return timed
