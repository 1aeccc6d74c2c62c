"""Times the phases of a step: `with timer.phase("rollout"): ...`, then `timer.take()` once a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_gvpo.observe.spans import Marker


class PhaseTimer:
    """Wall-clock seconds by phase: `totals` over the whole run, `take` since the last take.

    A phase may be entered many times a step. Phases must not be nested. With `synchronize`, a phase waits
    for the GPU before its clock starts and stops, so that a kernel counts in the phase that launched it.
    `markers` mark the phases for other tools.
    """

    def __init__(self, *, synchronize: bool = False, markers: Sequence[Marker] = ()) -> None:
        self.totals: dict[str, float] = {}
        self._since_take: defaultdict[str, float] = defaultdict(float)
        self._current: tuple[str, float] | None = None  # the phase that runs, and since when
        self._synchronize = synchronize
        self._markers = markers

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block, also if the block raises."""
        start = self._now()
        self._current = (name, start)
        try:
            with ExitStack() as marked:
                for marker in self._markers:
                    marked.enter_context(marker.phase(name))
                yield
        finally:
            self._current = None
            seconds = self._now() - start
            self._since_take[name] += seconds
            self.totals[name] = self.totals.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return seconds by phase since the last take."""
        taken = dict(self._since_take)
        self._since_take.clear()
        return taken

    def current(self) -> tuple[str, float] | None:
        """Return the phase that runs and its seconds so far; None between phases. Any thread may ask."""
        now = self._current
        return None if now is None else (now[0], time.perf_counter() - now[1])

    def _now(self) -> float:
        if self._synchronize:
            import torch

            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return time.perf_counter()
