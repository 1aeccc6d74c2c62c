"""Reports the progress of slow work on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_gvpo.core.environment import is_first_process

FIRST, AGAIN = 1.0, 10.0  # seconds until the first line, and between lines


@contextmanager
def slow_work(name: str) -> Iterator[Callable[[str], None]]:
    """Print "NAME: STATE" after a second of the block, then every ten seconds; on the first rank only.

    Yields a function that sets STATE. The lines come from a thread, so one long call cannot hold them back.
    """
    state, ended = "...", threading.Event()

    def now(text: str) -> None:
        nonlocal state
        state = text

    def tell() -> None:
        wait = FIRST
        while not ended.wait(wait):
            print(f"{name}: {state}", file=sys.stderr, flush=True)
            wait = AGAIN

    if not is_first_process():
        yield now
        return
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield now
    finally:
        ended.set()
        teller.join(timeout=1.0)  # no line may come after the block; a blocked terminal could delay one
