"""The jobs that wait for the ranks: sessions take turns, and a session's own jobs keep their order."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

# The most sequences that are sampled at once, over all requests that are joined.
MOST_SAMPLES = 4096


@dataclass(frozen=True)
class QueuedOperation:
    """An operation for the ranks, and the function that gets its outcome."""

    session_id: str
    operation: dict[str, Any]
    finish: Callable[[dict[str, Any] | Exception], None]  # called in the ranks' thread
    # Neighbours of one session with equal keys are sampled together; None: the job stands alone.
    batch_key: Hashable = None
    samples: int = 0


class FairQueue:
    """A thread-safe queue, in which the session that was served last comes last."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[QueuedOperation]] = OrderedDict()
        self._changed = threading.Condition()

    def put(self, job: QueuedOperation) -> None:
        with self._changed:
            self._waiting.setdefault(job.session_id, deque()).append(job)
            self._changed.notify()

    def take(self, timeout: float) -> list[QueuedOperation]:
        """The next session's next job, or its jobs that are sampled together; empty after `timeout` s."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout):
                return []
            session_id, jobs = self._waiting.popitem(last=False)
            taken = [jobs.popleft()]
            samples = taken[0].samples
            while (
                jobs
                and taken[0].batch_key is not None
                and jobs[0].batch_key == taken[0].batch_key
                and samples + jobs[0].samples <= MOST_SAMPLES
            ):
                samples += jobs[0].samples
                taken.append(jobs.popleft())
            if jobs:
                self._waiting[session_id] = jobs
            return taken

    def drop(self, session_id: str) -> list[QueuedOperation]:
        """Remove the jobs of a session whose client has left."""
        with self._changed:
            return list(self._waiting.pop(session_id, ()))
