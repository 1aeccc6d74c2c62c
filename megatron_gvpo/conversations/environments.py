"""The environments of conversations: the worker processes where they run, and one episode of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple, Self

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.core.user_functions import contents
from megatron_gvpo.groups import Prompt, utf8
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.workers import environments as handler
from megatron_gvpo.workers.environments import TOOLS, took_longer
from megatron_gvpo.workers.messages import Begin, Function, Step, WireError, prompt_bytes
from megatron_gvpo.workers.output import Printout
from megatron_gvpo.workers.process import AsyncWorkerProcess, CallFailed
from megatron_gvpo.workers.tools import tool_message

ATTEMPTS = 2  # a step that fails this often is not tried again
AT_ONCE = 64  # limit for overlapping steps in one process
_GRACE = 2.0  # seconds beyond a step's limit in which the worker itself may report that it is late


class EnvironmentLost(Exception):  # noqa: N818 - it is not a fault of this program
    """An environment failed, which is not the policy's fault: the conversation leaves its group."""


class Answer(NamedTuple):
    """An environment's chat messages, reward and counts. `messages` is None if it ended the conversation."""

    messages: list[dict[str, Any]] | None
    reward: float = 0.0
    counts: Mapping[str, float] = {}


class EnvironmentProcess(AsyncWorkerProcess):
    """One worker process. Steps of several conversations may run there at once if `overlaps` is true."""

    async def step(self, conversation: int, begin: Begin | None, text: str, seconds: float) -> Answer:
        """The environment's answer to the policy's turn. Raises CallFailed.

        A process that does not answer in time is ended, and then every step in this process has failed.
        """
        with self.call() as (number, result):
            try:
                async with asyncio.timeout(seconds + _GRACE):
                    await self.send_when_free(Step(number, conversation, begin, utf8(text), seconds))
                    value = await result
                    return Answer(value.messages, value.reward, value.counts)
            except TimeoutError:
                is_late = self.calls == 1  # false if another step may have delayed the process
                await self.end("another step held up its process")
                reason = took_longer(seconds)
                raise CallFailed(reason, "late" if is_late else "ended", is_gone=True) from None


class _EnvironmentWorker:
    """A process, and the steps that run in it."""

    def __init__(self, process: EnvironmentProcess) -> None:
        self.process = process
        self.steps = 0  # steps that wait or run
        self._running = 0
        self._alone = 0  # steps that run alone in the process, or wait to do so
        self._changed, self._replacing = asyncio.Condition(), asyncio.Lock()

    @asynccontextmanager
    async def admit(self, alone: bool) -> AsyncIterator[None]:
        """Context of one step, which waits until it may run: alone, or beside others if the process can."""
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
        """Start another process in place of the one that has ended. Raises RolloutError."""
        async with self._replacing:
            if self.process is not gone:
                return
            self.process = start()
            await self.process.ready()

    async def current(self) -> EnvironmentProcess:
        """The process, once it is ready."""
        async with self._replacing:
            return self.process


class Environments:
    """Starts the workers, and ends them. A context manager; conversations run inside, in one event loop."""

    def __init__(self, config: ConversationConfig) -> None:
        self._config = config
        options = dict(config.options)
        if config.has_tools:
            options = {
                "functions": list(config.tools),
                "parser": config.parser,
                "sandbox": config.sandbox.model_dump(),
                "mcp": [server.model_dump() for server in config.mcp],
            }
        spec = config.environment or TOOLS
        self._function = Function(f"rollout.conversation.environment={spec}", spec, options)
        self._files = contents([spec, options])
        self._printout = Printout(["tools" if config.has_tools else "environment"])
        self._workers: list[_EnvironmentWorker] = []
        self._numbers = count()

    def __enter__(self) -> Self:
        """Raises ConfigError if the environment cannot be loaded."""
        try:
            for _ in range(self._config.workers):
                self._workers.append(_EnvironmentWorker(self._start()))
            for worker in self._workers:
                worker.process.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        while self._workers:
            self._workers.pop().process.stop()
        self._printout.end_step()

    def _start(self) -> EnvironmentProcess:
        return EnvironmentProcess(handler, self._function, self._files, self._printout)

    def begin(self, prompt: Prompt, seed: int) -> Episode:
        """A conversation about `prompt`. Workers learn of the conversation with its first step.

        Raises RolloutError if its record does not have the earlier turns.
        """
        return Episode(self, next(self._numbers), prompt, seed, self._earlier_turns(prompt))

    def _earlier_turns(self, prompt: Prompt) -> list[str]:
        key = self._config.earlier_key
        turns = [] if key is None else prompt.record.get(key)
        if not isinstance(turns, list | tuple) or not all(isinstance(text, str) for text in turns):
            raise RolloutError(
                f"rollout.conversation.earlier_key={key}: in the record of prompt {prompt.id} it is "
                f"{str(turns)[:60]}, and should be a list of texts, the policy's turns so far"
            )
        return list(turns)

    def least_busy(self) -> _EnvironmentWorker:
        return min(self._workers, key=lambda worker: worker.steps)

    @property
    def has_tools(self) -> bool:
        """True if the environment runs functions, which keep nothing of a conversation."""
        return self._config.has_tools

    async def step(
        self, worker: _EnvironmentWorker, conversation: int, begin: Begin | None, text: str
    ) -> Answer:
        """The worker's answer; a worker that has ended is replaced. Raises CallFailed, RolloutError."""
        turns = 1 if begin is None else 1 + len(begin.turns)
        process = worker.process
        try:
            return await process.step(conversation, begin, text, turns * self._config.step_timeout)
        except CallFailed as error:
            if error.is_gone:
                await worker.replace(process, self._start)
            raise

    def end_step(self) -> None:
        """Begin the next step, in which printed lines are counted from 0."""
        self._printout.end_step()


class Episode:
    """One conversation with an environment.

    If its worker has ended, another one repeats the turns so far.
    """

    def __init__(
        self, environments: Environments, number: int, prompt: Prompt, seed: int, turns: list[str]
    ) -> None:
        """`turns` are the policy's turns that the prompt contains. A new worker gets these turns first."""
        self._environments = environments
        self._number = number
        self._prompt = prompt
        self._seed = seed
        self._turns = turns
        self.seconds = 0.0  # time of its answers, without failures, repetitions, and waiting for a process
        self._worker: _EnvironmentWorker | None = None
        self._workers = set[_EnvironmentWorker]()  # processes that got steps; any of them may run tools
        self._process: EnvironmentProcess | None = None  # the process that holds this conversation's state

    async def step(self, text: str) -> Answer:
        """The environment's answer to the policy's turn. Raises EnvironmentLost with the reason.

        If a process ends with several steps in it, the cause is unknown. So a second attempt runs alone.
        """
        for attempt in range(1, ATTEMPTS + 1):
            begin_s = running_seconds()
            try:
                worker = self._choose_worker()
                async with worker.admit(alone=attempt > 1):
                    process = await worker.current()
                    begin = None if self._process is process else self._begin()
                    self._process = None
                    begin_s = running_seconds()
                    answer = await self._environments.step(worker, self._number, begin, text)
                    self._process = process
            except CallFailed as error:
                if (answer_of_tool := self._tool_failure(error, attempt)) is not None:
                    self.seconds += running_seconds() - begin_s
                    return answer_of_tool
                if attempt == ATTEMPTS:
                    limit = " (rollout.conversation.step_timeout)" if error.cause == "late" else ""
                    raise EnvironmentLost(f"{error}{limit}") from None
            else:
                if begin is None or not self._turns:
                    self.seconds += running_seconds() - begin_s
                if not self._environments.has_tools:
                    self._turns.append(text)
                return answer
        raise AssertionError("unreachable")

    def _choose_worker(self) -> _EnvironmentWorker:
        """The worker that knows the conversation; for tools, and in the beginning, the least busy one."""
        if self._worker is None or self._environments.has_tools:
            self._worker = self._environments.least_busy()
            self._workers.add(self._worker)
        return self._worker

    def _tool_failure(self, error: CallFailed, attempt: int) -> Answer | None:
        """Return a tool's answer in place of the failure if the policy, which chose the call, caused it."""
        if not self._environments.has_tools:
            return None
        if error.cause == "late" or (error.is_gone and attempt == ATTEMPTS):
            return Answer(
                [tool_message("", f"Error: {error}")],
                counts={"tool_calls": 1.0, "tool_errors": 1.0},
            )
        return None

    def _begin(self) -> Begin:
        try:
            return Begin(prompt_bytes(self._prompt), self._seed, list(self._turns))
        except WireError as error:
            raise EnvironmentLost(f"its data record cannot be sent to a worker: {error}") from None

    def end(self) -> None:
        """Tell the workers to drop the conversation."""
        for worker in self._workers:
            worker.process.cancel([self._number])
