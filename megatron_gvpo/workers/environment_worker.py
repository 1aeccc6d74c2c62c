"""The process in which environments and tools run; `workers/guard.py` starts it. It must not import torch.

The first order is the setup; the others are steps of conversations, all of which run in one event loop. So
steps that wait (`async`) overlap, and one that computes holds up the others. A step says how its conversation
began where this process does not know it yet.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from megatron_gvpo.core.user_functions import described, hold
from megatron_gvpo.groups import prompt_of
from megatron_gvpo.workers.environment import Environment, NoAnswer, checked, load_environment, overlaps
from megatron_gvpo.workers.mcp_servers import ServerFailed, connect
from megatron_gvpo.workers.messages import (
    HUNG_UP,
    MAX_REPLY,
    MAX_TEXT,
    WireError,
    pack_values,
    receive_order,
    unpack_values,
)
from megatron_gvpo.workers.reward_worker import begin_work, private

_CLOSE = 60.0  # seconds that an environment has to close
_LONGEST = MAX_REPLY - 4096  # bytes of a reply's messages
TOOLS = "megatron_gvpo.workers.tools:Tools"  # the environment of tools
FORGET = -1  # the number of an order that asks for no answer: conversations have ended
READY, UNLOADABLE, SAID, FAILED, LATE = range(5)  # the kinds of a reply: [kind, ...]


def work(channel: int) -> None:
    """Answer the trainer's orders until it hangs up."""
    begin_work()
    own = socket.socket(fileno=private(channel))
    try:
        path, files, spec, options = receive_order(own)
        sys.path += [entry for entry in path if entry not in sys.path]
        hold(files)
        try:
            make = load_environment(spec, options)
        except ValueError as error:
            return _send(own, [UNLOADABLE, str(error)[:MAX_TEXT]])
        asyncio.run(_serve(own, make, options["mcp"] if spec == TOOLS else ()))
    except EOFError:
        pass  # the trainer is gone
    except (OSError, WireError):
        os._exit(HUNG_UP)


async def _serve(
    channel: socket.socket, make: Callable[[], Environment], servers: Sequence[Mapping[str, Any]]
) -> None:
    """Open the sessions with MCP servers, then answer steps. Raises EOFError, OSError, WireError."""
    await connect(servers)
    _send(channel, [READY, overlaps(make)])
    await _Work(channel, make).serve()


class _Work:
    """The conversations of this process, and the answers that are being made."""

    def __init__(self, channel: socket.socket, make: Callable[[], Environment]) -> None:
        self._channel, self._make = channel, make
        self._environments: dict[int, Environment] = {}
        self._tasks = set[asyncio.Task[None]]()
        self._process = os.getpid()

    async def serve(self) -> None:
        """Answer steps until the trainer hangs up. Raises EOFError, OSError, WireError."""
        loop = asyncio.get_running_loop()
        hung_up: asyncio.Future[None] = loop.create_future()

        def take() -> None:
            try:
                number, conversation, beginning, said, ended, seconds = receive_order(self._channel)
            except (EOFError, OSError, WireError) as error:
                loop.remove_reader(self._channel)
                return hung_up.set_exception(error)
            for other in ended:
                self._forget(other)
            if number != FORGET:
                self._start(self._answer(number, conversation, beginning, said, seconds))

        loop.add_reader(self._channel, take)
        await hung_up

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget(self, conversation: int) -> None:
        environment = self._environments.pop(conversation, None)
        if callable(close := getattr(environment, "close", None)):
            self._start(_closed(close))

    async def _answer(
        self, number: int, conversation: int, beginning: Any, said: str, seconds: float
    ) -> None:
        reply: list[Any]
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                if beginning is not None:
                    await self._begin(conversation, *beginning)
                step = self._environments[conversation].step
                reply = _bounded([SAID, number, *checked(await _result(step(said)))])
        except BaseException as error:
            self._forget(conversation)
            late = limit.expired() and not isinstance(error, ServerFailed)
            reply = [LATE, number] if late else [FAILED, number, failure(error)]
        if os.getpid() != self._process:  # the environment has forked, and its child returned
            os._exit(0)
        try:
            _send(self._channel, reply)
        except OSError:
            os._exit(HUNG_UP)

    async def _begin(self, conversation: int, prompt: bytes, seed: int, earlier: list[str]) -> None:
        environment: Any = self._make()
        self._environments[conversation] = environment
        await _result(environment.reset(prompt_of(unpack_values(prompt)), seed))
        for turn in earlier:
            await _result(environment.step(turn))


async def _closed(close: Callable[[], Any]) -> None:
    """Let an environment free what it holds. That it cannot is shown, and costs nobody anything."""
    try:
        async with asyncio.timeout(_CLOSE):
            await _result(close())
    except (Exception, SystemExit) as error:
        print(f"close: {described(error)}", file=sys.stderr, flush=True)


def failure(error: BaseException) -> str:
    """The reason that is sent of an error in the user's code, or of what that returned."""
    return (str(error) if isinstance(error, NoAnswer) else described(error))[:MAX_TEXT]


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _bounded(reply: list[Any]) -> list[Any]:
    """The reply; where its messages are too long for a packet, a notice instead of the longest of them."""
    kind, number, messages, reward, counts = reply
    if messages is None or (size := len(pack_values(messages))) <= _LONGEST:
        return reply
    shown, counts = list(messages), {**counts, "observations_dropped": 1.0}
    for i in sorted(range(len(messages)), key=lambda i: len(messages[i]["content"]), reverse=True):
        content = messages[i]["content"]
        shown[i] = {**messages[i], "content": (notice := too_long(len(content), "characters"))}
        size += len(pack_values(notice)) - len(pack_values(content))
        if size <= _LONGEST:
            return [kind, number, shown, reward, counts]
    few = [{"role": message["role"], "content": message["content"]} for message in shown[:100]]
    return [kind, number, few, reward, counts]


def too_long(count: int, unit: str) -> str:
    """The text that stands for an observation that is too long: it is never cut."""
    return f"[{count} {unit}: too long to be shown]"


def _send(channel: socket.socket, reply: list[Any]) -> None:
    channel.send(pack_values(reply), socket.MSG_NOSIGNAL)
