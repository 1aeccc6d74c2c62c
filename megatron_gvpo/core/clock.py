"""A clock that stops while this process is stopped, and event loops that use it.

`scontrol suspend`, Ctrl-Z and a frozen container stop a job with all of its processes. A time limit by the
machine's clock would then expire for work that could not run.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time

# A thread looks at the clock of the machine every _TICK seconds. If it has not looked for more than
# _STOPPED seconds, the process was stopped, or another thread let no other run: nothing could be waited for.
_TICK, _STOPPED = 0.5, 2.0


class _Clock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._stopped = 0.0
        self._ticker: threading.Thread | None = None

    def read(self) -> float:
        with self._lock:
            if self._ticker is None:
                self._last = time.monotonic()
                self._ticker = threading.Thread(target=self._tick, name="clock", daemon=True)
                self._ticker.start()
            now = time.monotonic()
            if now - self._last > _STOPPED:
                self._stopped += now - self._last
            self._last = now
            return now - self._stopped

    def _tick(self) -> None:
        never = threading.Event()
        while not never.wait(_TICK):
            self.read()

    def begin_again(self) -> None:
        """Make a new lock in a forked process, where the thread that held the old one may not exist."""
        self._lock, self._ticker = threading.Lock(), None


_clock = _Clock()
os.register_at_fork(after_in_child=_clock.begin_again)


def running_seconds() -> float:
    """Seconds, as of time.monotonic(), without those in which this process was stopped for over 2 s."""
    return _clock.read()


class _Loop(asyncio.SelectorEventLoop):
    def time(self) -> float:
        return running_seconds()


def event_loop() -> asyncio.AbstractEventLoop:
    """A new event loop whose timers do not count the time in which this process was stopped."""
    return _Loop()
