"""An asyncio event loop in its own thread, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any


class BackgroundLoop:
    """Runs coroutines in a thread beside the caller's; `close` cancels those that still run."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the coroutine; the future gives its result or raises its error."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to its end and return its result; an interrupted wait cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def cancel_all(self) -> None:
        """Cancel all coroutines and wait until they have ended."""
        self.run(_cancel_others())

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self.cancel_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
