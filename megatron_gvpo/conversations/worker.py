"""The process in which environments and tools run; `rewards/guard.py` starts it. It must not import torch.

It takes one order at a time: first the setup, then steps of conversations. A step says how its conversation
began where this process does not know it yet.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from megatron_gvpo.conversations.environment import Environment, checked, load_environment
from megatron_gvpo.groups import prompt_of
from megatron_gvpo.rewards.wire import (
    HUNG_UP,
    MAX_REPLY,
    MAX_TEXT,
    WireError,
    pack_values,
    receive_order,
    unpack_values,
)
from megatron_gvpo.rewards.worker import begin_work, private
from megatron_gvpo.runtime.user_functions import described

_LONGEST = MAX_REPLY - 4096  # bytes of a reply's messages
READY, UNLOADABLE, SAID, FAILED = range(4)  # the kinds of a reply: [kind, ...]


def work(channel: int) -> None:
    """Answer the trainer's orders until it hangs up."""
    begin_work()
    own = socket.socket(fileno=private(channel))
    try:
        path, spec, options = receive_order(own)
        sys.path += [entry for entry in path if entry not in sys.path]
        try:
            make = load_environment(spec, options)
        except ValueError as error:
            return _send(own, [UNLOADABLE, str(error)[:MAX_TEXT]])
        _send(own, [READY])
        with asyncio.Runner() as runner:
            _work(own, make, runner)
    except EOFError:
        pass  # the trainer is gone
    except (OSError, WireError):
        os._exit(HUNG_UP)


def _work(channel: socket.socket, make: Callable[[], Environment], runner: asyncio.Runner) -> None:
    """Answer steps for ever. `asyncio.Runner` gives all of them the same event loop."""
    process = os.getpid()
    environments: dict[int, Environment] = {}

    async def call(function: Callable[..., Any], *arguments: Any) -> Any:
        value = function(*arguments)
        return await value if inspect.isawaitable(value) else value

    while True:
        number, conversation, beginning, said, ended = receive_order(channel)
        for other in ended:
            environments.pop(other, None)
        try:
            if beginning is not None:
                prompt, seed, earlier = beginning
                environments[conversation] = environment = make()
                runner.run(call(environment.reset, prompt_of(unpack_values(prompt)), seed))
                for turn in earlier:
                    runner.run(call(environment.step, turn))
            reply = [SAID, number, *checked(runner.run(call(environments[conversation].step, said)))]
            reply = _bounded(reply)
        except BaseException as error:
            environments.pop(conversation, None)
            reply = [FAILED, number, described(error)[:MAX_TEXT]]
        if os.getpid() != process:  # the environment has forked, and its child returned
            os._exit(0)
        _send(channel, reply)


def _bounded(reply: list[Any]) -> list[Any]:
    """The reply; where its messages are too long for a packet, a notice stands for the content of each."""
    kind, number, messages, reward, counts = reply
    if messages is None or len(pack_values(messages)) <= _LONGEST:
        return reply
    notices = [
        {"role": message["role"], "content": too_long(len(message["content"]), "characters")}
        for message in messages[:100]
    ]
    return [kind, number, notices, reward, {**counts, "observations_dropped": 1.0}]


def too_long(count: int, unit: str) -> str:
    """The text that stands for an observation that is too long: it is never cut."""
    return f"[{count} {unit}: too long to be shown]"


def _send(channel: socket.socket, reply: list[Any]) -> None:
    channel.send(pack_values(reply), socket.MSG_NOSIGNAL)
