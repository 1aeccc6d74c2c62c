"""The trainer's end of a reward worker: it starts the process, gives it jobs, takes its replies, ends it."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.workers.guard import PATIENCE
from megatron_gvpo.workers.messages import (
    HUNG_UP,
    Failed,
    Importing,
    Job,
    Ready,
    Scored,
    Setup,
    Unloadable,
    WireError,
    receive_reply,
    send_order,
)
from megatron_gvpo.workers.output import Printout
from megatron_gvpo.workers.process import GuardedProcess, how_it_ended
from megatron_gvpo.workers.reward_functions import Component

_START = 600.0  # seconds that a worker has to import its functions, and a function to import its modules
_NOTICE = 0.5  # seconds between two notices that a function is importing


class Failure(NamedTuple):
    """The reason why a job has no reward; `killed`: SIGKILL ended its worker, maybe for no fault of it."""

    reason: str
    killed: bool = False


class WorkerProcess(GuardedProcess):
    """One worker process, and the jobs that it has yet to answer."""

    def __init__(
        self, components: Sequence[Component], files: dict[str, bytes], timeout: float, printout: Printout
    ) -> None:
        super().__init__("megatron_gvpo.workers.reward_worker", printout)
        self.pending: deque[Job] = deque()
        self.ready = False  # its functions are loaded
        self.failure: Failure | None = None  # why the first of `pending` gets no answer, and no later one
        self._components, self._timeout = components, timeout
        self._limit = self._deadline = time.monotonic() + _START
        try:
            notice = min(_NOTICE, timeout / 4)
            send_order(self.channel, Setup(sys.path, files, list(components), notice))
        except ConnectionError:
            pass  # it is gone, which `take` finds
        except OSError as error:
            self.stop()
            raise ConfigError(f"rewards: a worker cannot be told its functions: {error}") from None

    def give(self, jobs: Sequence[Job]) -> None:
        """Raises OSError if the process is gone."""
        send_order(self.channel, jobs)
        self.pending.extend(jobs)
        self._begin_job()

    def _begin_job(self) -> None:
        self._deadline = time.monotonic() + self._timeout
        self._limit = time.monotonic() + max(_START, self._timeout)

    @property
    def seconds_left(self) -> float:
        """Seconds until a reply is late; infinite while none is due."""
        due = self.pending or not self.ready
        return max(0.0, self._deadline - time.monotonic()) if due else float("inf")

    def take(self) -> dict[int, float | Failure]:
        """The answers that have come; sets `failure` where the next one will not, or where the process died.

        Raises ConfigError if a component's function cannot be loaded, or not in time.
        """
        answers: dict[int, float | Failure] = {}
        self.output.drain()
        try:
            while (reply := receive_reply(self.channel)) is not None:
                match reply:
                    case Ready() if not self.ready:
                        self.ready = True
                    case Unloadable(index, reason) if not self.ready and index < len(self._components):
                        raise ConfigError(self._unloadable(index, reason))
                    case Importing(job):
                        if self._is_next(job):
                            self._deadline = min(time.monotonic() + self._timeout, self._limit)
                    case Scored(job, reward) if self._is_next(job):
                        answers[self.pending.popleft().number] = reward
                        self._begin_job()
                    case Failed(job, reason) if self._is_next(job):
                        answers[self.pending.popleft().number] = Failure(reason)
                        self._begin_job()
                    case _:
                        raise WireError("no answer to the job")
        except WireError as error:
            self.failure = Failure(f"its process sent a message that is none of the worker's ({error})")
        except (EOFError, OSError):
            code = self.stop(patience=PATIENCE)
            self.failure = Failure(self._ended(code), killed=code == -signal.SIGKILL)
        else:
            if not self.seconds_left:
                self.failure = Failure(self._late())
        return answers

    def _is_next(self, job: int) -> bool:
        return self.ready and bool(self.pending) and job == self.pending[0].number

    def _unloadable(self, index: int, reason: str) -> str:
        component = self._components[index]
        key, value = ("function", component.function) if component.function else ("name", component.name)
        return f"rewards.components.{component.place}.{key}={value}: {reason}"

    def _late(self) -> str:
        if self.ready:
            return f"it took longer than rewards.timeout={self._timeout:g} seconds"
        raise ConfigError(
            f"rewards: a worker was not ready after {_START:g} seconds: importing {self._functions} takes "
            "longer, or waits for something"
        )

    @property
    def _functions(self) -> str:
        named = [component.function for component in self._components if component.function]
        return ", ".join(named) or "its functions"

    def _ended(self, code: int) -> str:
        how = how_it_ended(code)
        if not self.ready:
            return f"a worker ended while it imported {self._functions} ({how})"
        if code == HUNG_UP:
            return "it closed, or read from, a descriptor of its process that is not its own"
        return f"it ended its process ({how})"
