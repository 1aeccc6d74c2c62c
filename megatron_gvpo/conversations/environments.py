"""The worker processes of a run's environments, and the conversations that they hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from types import TracebackType
from typing import Self

from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.core.user_functions import contents
from megatron_gvpo.groups import Prompt
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.workers.environment_process import Answer, EnvironmentProcess, StepFailed
from megatron_gvpo.workers.environment_worker import TOOLS
from megatron_gvpo.workers.messages import WireError, prompt_bytes
from megatron_gvpo.workers.output import Printout
from megatron_gvpo.workers.tools import tool_message

ATTEMPTS = 2  # a step that fails so often is not tried again
AT_ONCE = 64  # steps that run at once in a process at most, where they overlap


class EnvironmentLost(Exception):  # noqa: N818 - it is no fault of this program
    """An environment failed, which is not the policy's doing: the conversation leaves its group."""


class _Worker:
    """A process, the steps that run in it, and the ended conversations that it has yet to forget."""

    def __init__(self, process: EnvironmentProcess) -> None:
        self.process, self.ended = process, list[int]()
        self.steps = 0  # that wait or run
        self._running = self._alone = 0  # steps that run; steps that run alone, or wait to do so
        self._changed, self._replacing = asyncio.Condition(), asyncio.Lock()

    @asynccontextmanager
    async def admit(self, alone: bool) -> AsyncIterator[None]:
        """A step runs inside: alone, or beside others where the process can do that."""
        self.steps += 1
        self._alone += alone
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._running == 0 if alone else self._has_room())
                self._running += 1
            try:
                yield
            finally:
                self._running -= 1
        finally:
            self.steps -= 1
            self._alone -= alone
            async with self._changed:
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return not self._alone and self._running < (AT_ONCE if self.process.overlaps else 1)

    async def replace(self, gone: EnvironmentProcess, start: Callable[[], EnvironmentProcess]) -> None:
        """Start another process in place of the one that is gone. Raises RolloutError."""
        async with self._replacing:
            if self.process is not gone:
                return
            self.process = start()
            try:
                await asyncio.to_thread(self.process.wait_ready)
            except ConfigError as problem:
                raise RolloutError(str(problem)) from None

    async def current(self) -> EnvironmentProcess:
        """The process, once it is ready."""
        async with self._replacing:
            return self.process


class Environments:
    """Starts the workers, and ends them. A context manager; conversations are held inside one event loop."""

    def __init__(self, config: ConversationConfig) -> None:
        self._config = config
        self._spec, self._options = config.environment or TOOLS, dict(config.options)
        if config.has_tools:
            self._options = {
                "functions": list(config.tools),
                "parser": config.parser,
                "sandbox": config.sandbox.model_dump(),
                "mcp": [server.model_dump() for server in config.mcp],
            }
        self._files = contents([self._spec, self._options])
        self._printout = Printout(["tools" if config.has_tools else "environment"])
        self._workers: list[_Worker] = []
        self._numbers = count()

    def __enter__(self) -> Self:
        """Raises ConfigError if the environment cannot be loaded."""
        try:
            for _ in range(self._config.workers):
                self._workers.append(_Worker(self._start()))
            for worker in self._workers:
                worker.process.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._workers:
            self._workers.pop().process.stop()
        self._printout.end_step()

    def _start(self) -> EnvironmentProcess:
        return EnvironmentProcess(self._spec, self._options, self._files, self._printout)

    def begin(self, prompt: Prompt, seed: int) -> Episode:
        """A conversation about `prompt`; nothing is asked before its first step.

        Raises RolloutError if its record does not have the earlier turns.
        """
        return Episode(self, next(self._numbers), prompt, seed, self._earlier(prompt))

    def _earlier(self, prompt: Prompt) -> list[str]:
        key = self._config.earlier_key
        turns = [] if key is None else prompt.record.get(key)
        if not isinstance(turns, list | tuple) or not all(isinstance(text, str) for text in turns):
            raise RolloutError(
                f"rollout.conversation.earlier_key={key}: in the record of prompt {prompt.id} it is "
                f"{str(turns)[:60]}, and should be a list of texts, the policy's turns so far"
            )
        return list(turns)

    def least_busy(self) -> _Worker:
        return min(self._workers, key=lambda worker: worker.steps)

    @property
    def has_tools(self) -> bool:
        """True if the environment runs functions, which keep nothing of a conversation."""
        return self._config.has_tools

    async def ask(
        self, worker: _Worker, conversation: int, beginning: tuple[bytes, int, list[str]] | None, said: str
    ) -> Answer:
        """The worker's answer; one that is gone is replaced. Raises StepFailed, RolloutError."""
        ended, worker.ended = worker.ended, []
        turns = 1 if beginning is None else 1 + len(beginning[2])
        process = worker.process
        try:
            return await process.step(conversation, beginning, said, ended, turns * self._config.step_timeout)
        except StepFailed as error:
            if error.gone:
                await worker.replace(process, self._start)
            raise

    def end_step(self) -> None:
        """The next step's lines of what environments print are counted from 0."""
        self._printout.end_step()


class Episode:
    """One conversation with an environment.

    A worker that is gone is replaced, and the turns so far repeated there.
    """

    def __init__(
        self, environments: Environments, number: int, prompt: Prompt, seed: int, earlier: list[str]
    ) -> None:
        """`earlier`: the policy's turns before the prompt ends, which a new worker hears first."""
        self._environments, self._number, self._prompt, self._seed = environments, number, prompt, seed
        self._earlier = earlier
        self.seconds = 0.0  # that its answers took, without failures, repetitions, and waiting for a process
        self._home: _Worker | None = None
        self._homes = set[_Worker]()  # all that have been asked: tools may run in any
        self._process: EnvironmentProcess | None = None  # the one that knows this conversation

    async def step(self, said: str) -> Answer:
        """The environment's answer. Raises EnvironmentLost with the reason.

        Where a process ends with several steps in it, nobody knows whose fault it was. So a second attempt
        runs alone.
        """
        tools = self._environments.has_tools
        for attempt in range(1, ATTEMPTS + 1):
            if self._home is None or tools:
                self._home = self._environments.least_busy()
                self._homes.add(self._home)
            begin = time.monotonic()
            try:
                async with self._home.admit(alone=attempt > 1):
                    process = await self._home.current()
                    beginning = None if self._process is process else self._beginning()
                    self._process = None
                    begin = time.monotonic()
                    answer = await self._environments.ask(self._home, self._number, beginning, said)
                    self._process = process
            except StepFailed as error:
                if tools and (error.late or (error.gone and attempt == ATTEMPTS)):
                    # The policy chose what the tool was to do.
                    self.seconds += time.monotonic() - begin
                    return Answer(
                        [tool_message("", f"Error: {error}")],
                        counts={"tool_calls": 1.0, "tool_errors": 1.0},
                    )
                if attempt == ATTEMPTS:
                    limit = " (rollout.conversation.step_timeout)" if error.late else ""
                    raise EnvironmentLost(f"{error}{limit}") from None
            else:
                if beginning is None or not self._earlier:
                    self.seconds += time.monotonic() - begin
                if not tools:
                    self._earlier.append(said)
                return answer
        raise AssertionError("unreachable")

    def _beginning(self) -> tuple[bytes, int, list[str]]:
        try:
            return prompt_bytes(self._prompt), self._seed, list(self._earlier)
        except WireError as error:
            raise EnvironmentLost(f"its data record cannot be sent to a worker: {error}") from None

    def end(self) -> None:
        """Let the workers forget the conversation, now or, where that is not possible, with the next step."""
        for worker in self._homes:
            worker.ended.append(self._number)
            if worker.process.forget(worker.ended):
                worker.ended = []
