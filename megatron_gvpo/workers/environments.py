"""The handler of environments and tools. All conversations of a process run in one event loop.

So steps that wait (`async`) overlap, and a step that computes delays the others. If this process does not
know a conversation yet, the step contains its beginning.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from megatron_gvpo.core.clock import event_loop
from megatron_gvpo.core.user_functions import described
from megatron_gvpo.workers.environment import Environment, checked_reply, load_environment, overlaps
from megatron_gvpo.workers.mcp_servers import ServerFailed, connect
from megatron_gvpo.workers.messages import (
    HUNG_UP,
    MAX_REPLY,
    Begin,
    CallError,
    CallResult,
    Cancel,
    Load,
    Ready,
    Step,
    WireError,
    pack_values,
    read_prompt,
)
from megatron_gvpo.workers.worker import Worker, reason_of

_CLOSE = 60.0  # seconds in which an environment must close
_LONGEST = MAX_REPLY - 4096  # the most bytes of a reply's messages
TOOLS = "megatron_gvpo.workers.tools:Tools"  # the environment of tools
_Make = Callable[[], Environment]


def load(spec: str, options: Mapping[str, Any]) -> _Make:
    """The class that `spec` names, with its options bound. Raises ValueError."""
    return load_environment(spec, options)


def serve(worker: Worker, functions: Sequence[_Make], load: Load) -> None:
    """Open the sessions with MCP servers, then answer steps. Raises EOFError, OSError, WireError."""
    [make], [environment] = functions, load.functions
    servers = environment.options["mcp"] if environment.spec == TOOLS else ()
    asyncio.run(_serve(worker, make, servers), loop_factory=event_loop)


async def _serve(worker: Worker, make: _Make, servers: Sequence[Mapping[str, Any]]) -> None:
    await connect(servers)
    worker.send(Ready(overlaps(make)))
    await _Episodes(worker, make).serve()


class _Episodes:
    """The conversations of this process, and the answers in progress."""

    def __init__(self, worker: Worker, make: _Make) -> None:
        self._worker, self._make = worker, make
        self._environments: dict[int, Environment] = {}
        self._tasks = set[asyncio.Task[None]]()

    async def serve(self) -> None:
        """Answer steps until the trainer hangs up. Raises EOFError, OSError, WireError."""
        loop = asyncio.get_running_loop()
        hung_up: asyncio.Future[None] = loop.create_future()

        def receive() -> None:
            try:
                match self._worker.receive():
                    case Step() as step:
                        self._start(self._answer(step))
                    case Cancel(numbers):
                        for conversation in numbers:
                            self._forget(conversation)
                    case _:
                        raise WireError("an order that is not Step or Cancel")
            except (EOFError, OSError, WireError) as error:
                loop.remove_reader(self._worker.channel)
                hung_up.set_exception(error)

        loop.add_reader(self._worker.channel, receive)
        await hung_up

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget(self, conversation: int) -> None:
        environment = self._environments.pop(conversation, None)
        if callable(close := getattr(environment, "close", None)):
            self._start(_close(close))

    async def _answer(self, step: Step) -> None:
        reply: CallResult | CallError
        limit = asyncio.timeout(step.seconds)
        try:
            async with limit:
                if step.begin is not None:
                    await self._begin(step.conversation, step.begin)
                answer = await _awaited(self._environments[step.conversation].step(step.text))
                messages, reward, counts = checked_reply(answer)
                reply = _bounded(CallResult(step.call, reward, counts, messages))
        except BaseException as error:
            self._forget(step.conversation)
            if limit.expired() and not isinstance(error, ServerFailed):
                reply = CallError(step.call, took_longer(step.seconds), "late")
            else:
                reply = CallError(step.call, reason_of(error))
        try:
            self._worker.send(reply)
        except OSError:
            os._exit(HUNG_UP)

    async def _begin(self, conversation: int, begin: Begin) -> None:
        environment: Any = self._make()
        self._environments[conversation] = environment
        await _awaited(environment.reset(read_prompt(begin.prompt), begin.seed))
        for text in begin.turns:
            await _awaited(environment.step(text))


async def _close(close: Callable[[], Any]) -> None:
    """Let an environment free its resources.

    A failure is shown to the user, and no conversation fails because of it.
    """
    try:
        async with asyncio.timeout(_CLOSE):
            await _awaited(close())
    except (Exception, SystemExit) as error:
        print(f"close: {described(error)}", file=sys.stderr, flush=True)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _bounded(result: CallResult) -> CallResult:
    """The result; if its messages are too long for a packet, a notice replaces the longest of them."""
    if result.messages is None or (size := len(pack_values(result.messages))) <= _LONGEST:
        return result
    messages, counts = list(result.messages), {**result.counts, "observations_dropped": 1.0}
    for i in sorted(range(len(messages)), key=lambda i: len(messages[i]["content"]), reverse=True):
        content = messages[i]["content"]
        messages[i] = {**messages[i], "content": (notice := too_long(len(content), "characters"))}
        size += len(pack_values(notice)) - len(pack_values(content))
        if size <= _LONGEST:
            return CallResult(result.call, result.reward, counts, messages)
    few = [{"role": message["role"], "content": message["content"]} for message in messages[:100]]
    return CallResult(result.call, result.reward, counts, few)


def took_longer(seconds: float) -> str:
    """The reason for the failure of a step that exceeded its limit."""
    return f"it took longer than {seconds:g} seconds"


def too_long(count: int, unit: str) -> str:
    """The text in place of an observation that is too long, because an observation is never cut."""
    return f"[{count} {unit}: too long to be shown]"
