"""The trainer's end of the processes that start programs: it waits for programs, and ends those that hang."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Self

from megatron_gvpo.conversations.dialogue import Dialogue
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.core.user_functions import contents
from megatron_gvpo.workers.environment_process import EnvironmentProcess
from megatron_gvpo.workers.environment_worker import FAILED, SAID
from megatron_gvpo.workers.messages import WireError, pack_values, receive_values, send_data
from megatron_gvpo.workers.output import Printout
from megatron_gvpo.workers.program_worker import END, GONE, START, Endpoint

_BEGIN = 0.25  # seconds after which the next program may start, where one has not asked the policy by then
_AGAIN = 0.05  # seconds until an order is sent again that there was no room for
_LISTEN = 0.2  # seconds between two looks at what programs print

Ended = tuple[float, dict[str, float]]  # a program's reward and counts


class ProgramFailed(Exception):  # noqa: N818 - it is no fault of this program
    """A program gave no result. `raised`: by an exception of its own, or it would never have ended."""

    def __init__(self, reason: str, raised: bool = False) -> None:
        super().__init__(reason)
        self.raised = raised


class _Process(EnvironmentProcess):
    module = "megatron_gvpo.workers.program_worker"
    key = "program"


class Starter:
    """One process that starts programs, and those that run. A context manager, used in one event loop."""

    def __init__(self, spec: str, options: Mapping[str, Any], idle_seconds: float) -> None:
        self._spec, self._options, self._idle = spec, options, idle_seconds
        self._files = contents([spec, options])
        self._printout = Printout(["program"])
        self._starting = asyncio.Lock()
        self._numbers = count()
        self._running: dict[int, asyncio.Future[Ended]] = {}  # and those that wait for their start
        self._started = set[int]()
        self._listener: asyncio.Task[None] | None = None
        self._gone = False

    def __enter__(self) -> Self:
        """Raises ConfigError if the program cannot be loaded."""
        self._process = _Process(self._spec, self._options, self._files, self._printout)
        return self

    def wait_ready(self) -> None:
        """Raises ConfigError if the program cannot be loaded."""
        self._process.wait_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop()
        self._printout.end_step()

    @property
    def load(self) -> int:
        """Programs that run, or wait for their start."""
        return len(self._running)

    def end_step(self) -> None:
        """The next step's lines of what programs print are counted from 0."""
        self._printout.end_step()

    async def run(self, prompt: bytes, endpoint: Endpoint, dialogue: Dialogue) -> Ended:
        """The program's reward and counts. Raises ProgramFailed, and the engine's errors."""
        number = next(self._numbers)
        result: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._running[number] = result
        try:
            async with self._starting:  # so that programs do not wait for each other's imports
                await self._order([START, number, prompt, list(endpoint)])
                self._started.add(number)
                dialogue.moved()
                first = asyncio.ensure_future(dialogue.first_call.wait())
                waits: set[asyncio.Future[Any]] = {first, result, dialogue.failed}
                await asyncio.wait(waits, timeout=_BEGIN, return_when=asyncio.FIRST_COMPLETED)
                first.cancel()
            while not result.done():
                left = self._idle - dialogue.idle_seconds()
                if left <= 0 and dialogue.insists:
                    raise ProgramFailed("it went on asking although nothing was left", raised=True)
                if left <= 0:
                    raise ProgramFailed(
                        f"it neither asked the policy nor returned for {self._idle:g} seconds "
                        "(rollout.conversation.step_timeout)"
                    )
                waiting: set[asyncio.Future[Any]] = {result, dialogue.failed}
                await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if dialogue.failed.done():
                    dialogue.failed.result()
            return result.result()
        finally:
            del self._running[number]
            if not result.done():
                result.cancel()
                if number in self._started:
                    self._kill(number)
            self._started.discard(number)

    async def _order(self, order: list[Any]) -> None:
        """Tell the process; one that is gone is replaced. Raises RolloutError if there can be no other."""
        deadline = time.monotonic() + self._idle
        while True:
            if self._gone:
                await self._restart()
            if self._listener is None:
                self._listener = asyncio.create_task(self._listen())
            try:
                return self._send(order)
            except BlockingIOError:  # it has not read the orders before this one
                if time.monotonic() > deadline:
                    self._fail_all()
                await asyncio.sleep(_AGAIN)
            except OSError:
                self._fail_all()

    def _kill(self, number: int) -> None:
        """Let the process end a program, as soon as it reads."""
        with suppress(OSError):
            try:
                self._send([END, number])
            except BlockingIOError:
                asyncio.get_running_loop().call_later(_AGAIN, self._kill, number)

    async def _restart(self) -> None:
        if self._listener is not None:
            await self._listener
        self._process.stop()
        self._process = _Process(self._spec, self._options, self._files, self._printout)
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._process.wait_ready)
        except ConfigError as problem:
            raise RolloutError(str(problem)) from None
        self._gone = False

    def _send(self, order: list[Any]) -> None:
        send_data(self._process.channel, pack_values(order))

    async def _listen(self) -> None:
        """Take results and output while programs run."""
        loop, channel = asyncio.get_running_loop(), self._process.channel.fileno()
        came = asyncio.Event()
        loop.add_reader(channel, came.set)
        try:
            while self._running and not self._gone:
                with suppress(TimeoutError):
                    await asyncio.wait_for(came.wait(), _LISTEN)
                came.clear()
                self._process.output.drain()
                self._take()
        finally:
            loop.remove_reader(channel)
            self._listener = None

    def _take(self) -> None:
        """The results that have come; where the process is gone, every program that runs has failed."""
        try:
            while (values := receive_values(self._process.channel)) is not None:
                self._settle(values)
        except (EOFError, OSError, WireError):
            self._fail_all()

    def _fail_all(self) -> None:
        """The process is gone, or is to be replaced: its programs end with it."""
        self._gone = True
        for number in self._started:
            if not (result := self._running[number]).done():
                result.set_exception(ProgramFailed("the process that starts programs has ended"))

    def _settle(self, values: Any) -> None:
        """Hand a program's result to who waits for it; the user's code ran there, so it is checked."""
        match values:
            case [kind, int(number), *said]:
                result = self._running.get(number)
            case _:
                raise WireError("no reply")
        if result is None or result.done():
            return
        match said:
            case [float(reward), dict(counts)] if kind == SAID and _are_numbers(reward, counts):
                result.set_result((reward, counts))
            case [str(reason)] if kind in (FAILED, GONE):
                result.set_exception(ProgramFailed(reason, raised=kind == FAILED))
            case _:
                result.set_exception(ProgramFailed("its process wrote what is no result"))


def _are_numbers(reward: float, counts: dict[Any, Any]) -> bool:
    return all(type(n) is float and math.isfinite(n) for n in (reward, *counts.values())) and all(
        isinstance(name, str) for name in counts
    )
