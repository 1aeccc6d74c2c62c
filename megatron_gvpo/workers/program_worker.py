"""The process that starts programs, each in a process of its own; `workers/guard.py` starts it.

It must not import torch. It takes the orders [START, number, prompt, endpoint] and [END, number], and replies
when a program's process has ended. It has one thread, so that it can fork.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import inspect
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

from megatron_gvpo.core.environment import die_with_parent
from megatron_gvpo.core.real_number import NoNumberError, real_number
from megatron_gvpo.core.user_functions import check_call, hold, load_function
from megatron_gvpo.groups import prompt_of
from megatron_gvpo.workers.environment import NoAnswer, Reply, checked
from megatron_gvpo.workers.environment_worker import FAILED, READY, SAID, UNLOADABLE, failure
from megatron_gvpo.workers.messages import (
    HUNG_UP,
    MAX_REPLY,
    MAX_TEXT,
    WireError,
    pack_values,
    receive_order,
    unpack_values,
)
from megatron_gvpo.workers.process import how_it_ended
from megatron_gvpo.workers.reward_worker import begin_work, private

START, END = range(2)  # the kinds of an order
GONE = 5  # the kind of a reply, beside those of `conversations.worker`: the program's process ended by itself
_LONGEST = MAX_REPLY - 4096  # bytes of a program's result: its pipe holds them
# Modules that the openai package imports at the first call of a client: here, and not in every program.
_LATE = ("openai.resources.chat.completions", "anyio._backends._asyncio", "httpcore")


class _Child(NamedTuple):
    number: int
    process: int
    ends: int  # a descriptor that is readable when the process has ended
    result: int  # a pipe


def work(channel: int) -> None:
    """Start programs until the trainer hangs up."""
    begin_work()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a program takes two descriptors
    own = socket.socket(fileno=private(channel))
    try:
        path, files, spec, options = receive_order(own)
        sys.path += [entry for entry in path if entry not in sys.path]
        hold(files)
        try:
            run = load_program(spec, options)
        except ValueError as error:
            own.send(pack_values([UNLOADABLE, str(error)[:MAX_TEXT]]), socket.MSG_NOSIGNAL)
            return
        if "openai" in sys.modules:
            for name in _LATE:
                importlib.import_module(name)
        own.send(pack_values([READY, True]), socket.MSG_NOSIGNAL)
        _serve(own, run)
    except EOFError:
        pass  # the trainer is gone
    except (OSError, WireError):
        os._exit(HUNG_UP)


def _serve(channel: socket.socket, run: Callable[..., Any]) -> NoReturn:
    children: dict[int, _Child] = {}  # by the descriptor `ends`
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                channel.send(_reply(children.pop(descriptor)), socket.MSG_NOSIGNAL)
                continue
            kind, number, *rest = receive_order(channel)
            if kind == START:
                child = _start(run, children, number, *rest)
                children[child.ends] = child
                poll.register(child.ends, select.POLLIN)
            for child in children.values():
                if kind == END and child.number == number:
                    _kill(child)


def _start(
    run: Callable[..., Any], children: dict[int, _Child], number: int, prompt: bytes, endpoint: list[Any]
) -> _Child:
    result, theirs = os.pipe()
    worker = os.getpid()
    if (process := os.fork()) == 0:
        os.setsid()
        die_with_parent(worker)
        for child in children.values():
            os.close(child.ends)
            os.close(child.result)
        os.close(result)
        _run(run, prompt, Endpoint(*endpoint), fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 200))
    os.close(theirs)
    os.set_blocking(result, False)
    return _Child(number, process, os.pidfd_open(process), result)


def _run(run: Callable[..., Any], prompt: bytes, endpoint: Endpoint, out: int) -> NoReturn:
    """The life of a program's process."""
    process = os.getpid()
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = endpoint.base_url, endpoint.api_key
    for name in ("no_proxy", "NO_PROXY"):  # a proxy of the environment does not reach this machine
        os.environ[name] = ",".join(filter(None, ["127.0.0.1", os.environ.get(name)]))
    try:
        value = run(prompt_of(unpack_values(prompt)), endpoint)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        result = pack_values([SAID, *ended(value)])
        if len(result) > _LONGEST:
            raise ValueError(f"the program returned {len(result)} bytes of counts")
    except BaseException as error:
        result = pack_values([FAILED, failure(error)])
    if os.getpid() == process:  # else the program has forked, and its child returned
        os.write(out, result)
    os._exit(0)


async def _awaited(value: Any) -> Any:
    return await value


def _kill(child: _Child) -> None:
    """End the program, and what it started in its session."""
    with suppress(OSError):
        signal.pidfd_send_signal(child.ends, signal.SIGKILL)
    with suppress(OSError):
        os.killpg(child.process, signal.SIGKILL)


def _reply(child: _Child) -> bytes:
    """[SAID, number, reward, counts], or [FAILED or GONE, number, reason], of a program that has ended."""
    with suppress(OSError):
        os.killpg(child.process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
    try:
        data = os.read(child.result, MAX_REPLY)
        how = f"it ended its process ({how_it_ended(code)})"
        kind, *values = unpack_values(data) if data else (GONE, how)
    except (OSError, WireError):
        kind, values = GONE, ["its process wrote what is no result"]
    os.close(child.ends)
    os.close(child.result)
    return pack_values([kind, child.number, *values])


# The user's agent program: what it is given, and what it may return.


class Endpoint(NamedTuple):
    """Where a program asks the policy: arguments of an OpenAI client. The key is good for one rollout.

    The members of a group have the same `seed`, for what else the program draws.
    """

    base_url: str
    api_key: str
    seed: int = 0


def load_program(spec: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that `spec` names, with its options bound. Raises ValueError that says what is wrong."""
    found = load_function(spec)
    check_program(found, options)
    return partial(found, **options)


def check_program(found: Any, options: Mapping[str, Any]) -> None:
    """Raises ValueError for a function that is no program, or cannot be called with these options."""
    if inspect.isclass(found):
        raise ValueError("it is a class; a program is a function run(prompt, endpoint)")
    check_call(found, "run(prompt, endpoint)", 2, dict(options))


def ended(value: Any) -> tuple[float, dict[str, float]]:
    """(reward, counts) of what a program returned: a number, a Reply or None. Raises NoAnswer."""
    if isinstance(value, Reply) and value.says is not None:
        raise NoAnswer("a program's Reply has a reward and counts; `says` must be None")
    try:
        reply = value if isinstance(value, Reply) else Reply(None, real_number(value or 0.0))
    except NoNumberError:
        raise NoAnswer(
            f"the program returned {type(value).__name__} {str(value)[:60]!r}: want the reward as a number, "
            "a Reply or None"
        ) from None
    _, reward, counts = checked(reply)
    return reward, counts
