"""The handler of agent programs: it runs each of them in a process of its own.

The handler's process has one thread, so that it can fork. It replies when a program's process has ended.
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
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

from megatron_gvpo.core.environment import die_with_parent
from megatron_gvpo.core.plain_values import NoNumberError, real_number
from megatron_gvpo.core.user_functions import check_signature, load_function
from megatron_gvpo.workers.environment import Outage, Reply, WrongValue, checked_reply
from megatron_gvpo.workers.messages import (
    MAX_REPLY,
    MAX_TEXT,
    CallError,
    CallResult,
    Cancel,
    Cause,
    Load,
    Ready,
    RunProgram,
    WireError,
    decode,
    encode,
    read_prompt,
)
from megatron_gvpo.workers.process import how_it_ended
from megatron_gvpo.workers.worker import PRIVATE, Worker, reason_of

_LONGEST = MAX_REPLY - 4096  # limit for a program's result, which must fit into its pipe
# Modules that the openai package imports at a client's first call. They are imported here once, and not again
# in every program.
_LATE = ("openai.resources.chat.completions", "anyio._backends._asyncio", "httpcore")
Program = Callable[..., Any]


def load(spec: str, options: Mapping[str, Any]) -> Program:
    """The function that `spec` names, with its options bound. Raises ValueError."""
    function = load_function(spec)
    check_program(function, options)
    program = partial(function, **options)
    prepare(program)
    return program


def prepare(program: Program) -> None:
    """Call the program's own `prepare` with its options, if it has one. Raises ValueError."""
    assert isinstance(program, partial)
    if callable(own := getattr(program.func, "prepare", None)):
        own(**program.keywords)


def check_program(function: Any, options: Mapping[str, Any]) -> None:
    """Raises ValueError for anything but a function that can be called with these options."""
    if inspect.isclass(function):
        raise ValueError("it is a class; a program is a function run(prompt, endpoint)")
    check_signature(function, "run(prompt, endpoint)", 2, options)


def serve(worker: Worker, functions: Sequence[Program], load: Load) -> NoReturn:
    """Start programs until the trainer hangs up. Raises EOFError, OSError, WireError."""
    [program] = functions
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every program that runs needs two descriptors
    if "openai" in sys.modules:
        for name in _LATE:
            importlib.import_module(name)
    worker.send(Ready())
    children: dict[int, _Child] = {}  # by the descriptor `ends`
    poll = select.poll()
    poll.register(worker.channel, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                worker.send(_reply(children.pop(descriptor)))
                continue
            match worker.receive():
                case RunProgram() as run:
                    try:
                        prepare(program)
                    except ValueError as error:
                        worker.send(CallError(run.call, str(error)[:MAX_TEXT], "outage"))
                        continue
                    child = _start(program, children, run)
                    children[child.ends] = child
                    poll.register(child.ends, select.POLLIN)
                case Cancel(numbers):
                    for child in children.values():
                        if child.call in numbers:
                            _kill(child)
                case _:
                    raise WireError("an order that is not RunProgram or Cancel")


class _Child(NamedTuple):
    call: int
    process: int
    ends: int  # a descriptor that is readable when the process has ended
    result: int  # descriptor of a pipe


def _start(program: Program, children: dict[int, _Child], run: RunProgram) -> _Child:
    result, result_of_child = os.pipe()
    worker = os.getpid()
    if (process := os.fork()) == 0:
        os.setsid()
        die_with_parent(worker)
        for child in children.values():
            os.close(child.ends)
            os.close(child.result)
        os.close(result)
        _run(program, run, fcntl.fcntl(result_of_child, fcntl.F_DUPFD_CLOEXEC, PRIVATE))
    os.close(result_of_child)
    os.set_blocking(result, False)
    return _Child(run.call, process, os.pidfd_open(process), result)


def _run(program: Program, run: RunProgram, result: int) -> NoReturn:
    """Run a program in this process, which ends with it."""
    process = os.getpid()
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = run.endpoint.base_url, run.endpoint.api_key
    for name in ("no_proxy", "NO_PROXY"):  # a proxy would not reach this machine
        os.environ[name] = ",".join(filter(None, ["127.0.0.1", os.environ.get(name)]))
    try:
        value = program(read_prompt(run.prompt), run.endpoint)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        reply = encode(CallResult(run.call, *_checked_result(value)))
        if len(reply) > _LONGEST:
            raise ValueError(f"the program returned {len(reply)} bytes of counts")
    except BaseException as error:
        # An outage differs from a program's end because the policy had no turns or tokens left.
        cause: Cause = "outage" if isinstance(error, Outage) else "raised"
        reply = encode(CallError(run.call, reason_of(error), cause))
    if os.getpid() == process:  # otherwise the program has forked, and the child process has returned
        os.write(result, reply)
    os._exit(0)


async def _awaited(value: Any) -> Any:
    return await value


def _kill(child: _Child) -> None:
    """End the program, and the other processes of its group; those of other groups end with the worker."""
    with suppress(OSError):
        signal.pidfd_send_signal(child.ends, signal.SIGKILL)
    with suppress(OSError):
        os.killpg(child.process, signal.SIGKILL)


def _reply(child: _Child) -> CallResult | CallError:
    """The reply about a program that has ended: its result, or why it has none."""
    with suppress(OSError):
        os.killpg(child.process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
    reply: CallResult | CallError = CallError(
        child.call, f"it ended its process ({how_it_ended(code)})", "ended"
    )
    try:
        if data := os.read(child.result, MAX_REPLY):
            reply = decode(data, CallResult | CallError)  # type: ignore[arg-type]
            if reply.call != child.call:
                raise WireError("the result of another call")
    except (OSError, WireError):
        reply = CallError(child.call, "its process wrote what is not a result", "ended")
    os.close(child.ends)
    os.close(child.result)
    return reply


def _checked_result(value: Any) -> tuple[float, dict[str, float]]:
    """(reward, counts) from the result of a program: a number, a Reply or None. Raises WrongValue."""
    if isinstance(value, Reply) and value.says is not None:
        raise WrongValue("a program's Reply has a reward and counts; `says` must be None")
    try:
        reply = value if isinstance(value, Reply) else Reply(None, real_number(value or 0.0))
    except NoNumberError:
        raise WrongValue(
            f"the program returned {type(value).__name__} {str(value)[:60]!r}: want the reward as a number, "
            "a Reply or None"
        ) from None
    _, reward, counts = checked_reply(reply)
    return reward, counts
