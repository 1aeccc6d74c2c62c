"""The trainer's end of a process in which environments run: it asks, and waits no longer than allowed."""

from __future__ import annotations

import asyncio
import math
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.workers.environment import Messages
from megatron_gvpo.workers.environment_worker import FAILED, FORGET, LATE, READY, SAID, UNLOADABLE
from megatron_gvpo.workers.guard import PATIENCE
from megatron_gvpo.workers.messages import WireError, pack_values, receive_values, send_data
from megatron_gvpo.workers.output import Printout
from megatron_gvpo.workers.process import GuardedProcess, how_it_ended

_START = 600.0  # seconds that a worker has to import the environment
_GRACE = 2.0  # seconds that a worker has beyond a step's own, to say that the step takes too long


class Answer(NamedTuple):
    """An environment's words, reward and counts; `says` is None if it ended the conversation."""

    says: Messages | None
    reward: float = 0.0
    counts: Mapping[str, float] = {}


class _Asked(NamedTuple):
    """A step that runs, and the seconds that it may take."""

    answer: asyncio.Future[Answer]
    seconds: float


class StepFailed(Exception):  # noqa: N818 - it is no fault of this program
    """A step has no answer. `gone`: its process ended or was ended; `late`: the step took too long."""

    def __init__(self, reason: str, gone: bool, late: bool = False) -> None:
        super().__init__(reason)
        self.gone, self.late = gone, late


class EnvironmentProcess(GuardedProcess):
    """One process, in which steps of several conversations may run at once where `overlaps` is true."""

    module = "megatron_gvpo.workers.environment_worker"  # where its `work` is
    key = "environment"  # of `rollout.conversation`
    overlaps = False

    def __init__(
        self, spec: str, options: Mapping[str, Any], files: Mapping[str, bytes], printout: Printout
    ) -> None:
        """`files`: the users', as the run began with them."""
        super().__init__(self.module, printout)
        self._spec = spec
        self._numbers = count()
        self._asked: dict[int, _Asked] = {}
        self._heard = set[int]()  # descriptors that the event loop watches
        self._ending: asyncio.Task[None] | None = None
        with suppress(OSError):  # it is gone, which `wait_ready` finds
            send_data(self.channel, pack_values([sys.path, dict(files), spec, dict(options)]))

    def wait_ready(self) -> None:
        """Raises ConfigError if the environment cannot be loaded, or not in time. Blocks."""
        deadline = time.monotonic() + _START
        reply, problem = None, ""
        try:
            while (reply := receive_values(self.channel)) is None and not problem:
                select.select(self.waits_for(), [], [], 1.0)
                self.output.drain()
                if time.monotonic() > deadline:
                    problem = f"it took longer than {_START:g} seconds"
        except WireError as error:
            problem = _no_message(error)
        except (EOFError, OSError):
            problem = _ended(self.stop(PATIENCE))
        if problem:
            self.stop()
            raise ConfigError(f"rollout.conversation: a worker did not start: {problem}")
        match reply:
            case [kind, str(reason)] if kind == UNLOADABLE:
                self.stop()
                raise ConfigError(f"rollout.conversation.{self.key}={self._spec}: {reason}")
            case [kind, bool(overlaps)] if kind == READY:
                self.overlaps = overlaps
            case _:
                self.stop()
                raise ConfigError(
                    "rollout.conversation: a worker began with a message that is none of its own"
                )

    async def step(
        self,
        conversation: int,
        beginning: tuple[bytes, int, list[str]] | None,
        said: str,
        ended: list[int],
        seconds: float,
    ) -> Answer:
        """The answer to `said`. Raises StepFailed; where it says `gone`, this object is of no more use.

        A process that does not answer in time is ended, and then every step in it has failed.
        """
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._asked[number] = _Asked(answer, seconds)
        if self._ending is None:
            self._hear(loop)
        try:
            async with asyncio.timeout(seconds + _GRACE):
                await self._send(pack_values([number, conversation, beginning, said, ended, seconds]))
                if self._ending is not None and self._ending.done() and not answer.done():
                    raise StepFailed("its process had ended before", gone=True)
                return await answer
        except TimeoutError:
            alone = len(self._asked) == 1
            await self._end("another step held up its process")
            raise StepFailed(_late(seconds), gone=True, late=alone) from None
        finally:
            del self._asked[number]
            if not self._asked:
                self._hear_no_more(loop)

    def forget(self, ended: list[int]) -> bool:
        """Let the worker forget conversations that have ended; False if it cannot be told at this moment."""
        try:
            send_data(self.channel, pack_values([FORGET, 0, None, "", ended, 0.0]))
        except OSError:
            return False
        return True

    async def _send(self, order: bytes) -> None:
        """Raises StepFailed if the worker is gone."""
        while self._ending is None:
            try:
                return send_data(self.channel, order)
            except BlockingIOError:  # it does not read at this moment
                await asyncio.sleep(0.05)
            except OSError as error:
                await self._end(f"its process cannot be asked: {error}")
        await self._ending

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        for descriptor in set(self.waits_for()) - self._heard:
            loop.add_reader(descriptor, self._take, loop)
            self._heard.add(descriptor)

    def _hear_no_more(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._heard:
            loop.remove_reader(self._heard.pop())

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take what was printed, and hand out the answers that have come."""
        self.output.drain()
        for descriptor in self._heard - set(self.waits_for()):
            loop.remove_reader(descriptor)
            self._heard.discard(descriptor)
        try:
            while (reply := receive_values(self.channel)) is not None:
                self._settle(reply)
        except WireError as error:
            self._end(_no_message(error))
        except (EOFError, OSError):
            self._end(None)

    def _settle(self, reply: Any) -> None:
        """Hand an answer to who asked. Raises WireError: the user's code ran there, so all is checked."""
        match reply:
            case [int(kind), int(number), *values]:
                asked = self._asked.get(number)
            case _:
                raise WireError("no answer")
        if asked is None or asked.answer.done():
            return  # nobody waits for it any more
        match values:
            case [says, float(reward), dict(counts)] if kind == SAID and _is_right(says, reward, counts):
                asked.answer.set_result(Answer(says, reward, counts))
            case [str(reason)] if kind == FAILED:
                asked.answer.set_exception(StepFailed(reason, gone=False))
            case [] if kind == LATE:
                asked.answer.set_exception(StepFailed(_late(asked.seconds), gone=False, late=True))
            case _:
                raise WireError("no answer")

    def _end(self, reason: str | None) -> asyncio.Task[None]:
        """End the process; then all steps in it have failed, with the reason, or else with how it ended."""
        if self._ending is None:
            loop = asyncio.get_running_loop()
            self._hear_no_more(loop)
            self._ending = loop.create_task(self._fail_all(reason))
        return self._ending

    async def _fail_all(self, reason: str | None) -> None:
        loop = asyncio.get_running_loop()
        code = await loop.run_in_executor(None, self.stop, PATIENCE if reason is None else 0.0)
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(StepFailed(reason or _ended(code), gone=True))


def _late(seconds: float) -> str:
    return f"it took longer than {seconds:g} seconds"


def _no_message(error: WireError) -> str:
    return f"its process sent a message that is none of the worker's ({error})"


def _ended(code: int) -> str:
    killed = " (perhaps by the kernel, for memory)" if code == -signal.SIGKILL else ""
    return f"it ended its process ({how_it_ended(code)}{killed})"


def _is_right(says: Any, reward: float, counts: dict[Any, Any]) -> bool:
    """True for an answer of the worker's own form: the user's code runs there, so everything is checked."""
    numbers = [reward, *counts.values()]
    if not all(type(n) is float and math.isfinite(n) for n in numbers) or not all(
        isinstance(name, str) for name in counts
    ):
        return False
    return says is None or (
        isinstance(says, list)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in says
        )
    )
