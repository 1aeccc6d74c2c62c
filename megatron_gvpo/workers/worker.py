"""The worker's side of a process that runs users' code: loads the trainer's functions, then serves calls.

The handler defines the calls. A handler is a module with two functions. `load(spec, options)` returns the
function or class that the configuration names, and raises ValueError if it cannot be used. `serve(worker,
functions, load)` sends Ready and answers calls until the trainer hangs up. The handlers are `rewards`,
`environments` and `programs`, beside this file. None of them imports torch, so that a process starts fast and
stays small.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from megatron_gvpo.core.user_functions import described, hold
from megatron_gvpo.workers.environment import WrongValue
from megatron_gvpo.workers.messages import (
    HUNG_UP,
    MAX_TEXT,
    Load,
    Order,
    Unloadable,
    WireError,
    WorkerReply,
    receive_order,
    send_reply,
)
from megatron_gvpo.workers.reaper import SIGNALS

# The worker's own descriptors begin with this one. A function that counts up from 3 does not reach them.
PRIVATE = 200


def work(channel: int, handler: str) -> None:
    """Load the functions of the first order with the module `handler`, and serve calls."""
    for number in SIGNALS:  # handlers, because processes that a function starts would inherit SIG_IGN
        signal.signal(number, lambda *_: None)
    faulthandler.enable()
    worker = Worker(channel)
    try:
        load = worker.receive()
        if not isinstance(load, Load):
            raise WireError("the first order is not Load")
        # The current directory comes last: a user's random.py there does not hide Python's own.
        sys.path += [entry for entry in (*load.path, os.getcwd()) if entry not in sys.path]
        hold(load.files)
        module = import_module(handler)
        functions: list[Callable[..., Any]] = []
        for index, function in enumerate(load.functions):
            worker.announce(index)
            try:
                functions.append(module.load(function.spec, function.options))
            except ValueError as error:
                return worker.send(Unloadable(index, str(error)[:MAX_TEXT]))
            except Exception as error:  # an error of the user's `prepare`, such as a refused connection
                return worker.send(Unloadable(index, described(error)))
        module.serve(worker, functions, load)
    except EOFError:
        pass  # the trainer has ended
    except (OSError, WireError):
        os._exit(HUNG_UP)


class Worker:
    """The worker's end of the socket to the trainer, and of the pipe with its output."""

    def __init__(self, channel: int) -> None:
        self.channel = socket.socket(fileno=_private(channel))
        self._output = _private(1, is_kept=True)
        self._process = os.getpid()
        self._announced: int | None = None  # the function that prints now

    def receive(self) -> Order:
        """The next order, for which it waits.

        Raises EOFError if the trainer has ended, OSError, WireError.
        """
        return receive_order(self.channel)

    def send(self, reply: WorkerReply) -> None:
        """Raises OSError if the trainer has ended. A forked child of the user's code ends here."""
        if os.getpid() != self._process:
            os._exit(0)
        send_reply(self.channel, reply)

    def announce(self, function: int) -> None:
        """Mark in the output that the next lines come from this function."""
        _open_streams()
        if function != self._announced:
            self._announced = function
            with suppress(OSError):
                os.write(self._output, b"\0%d\0" % function)


def _open_streams() -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(getattr(sys, name), "closed", True):
            with suppress(OSError):  # its descriptor is closed, too
                stream = open(number, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
                setattr(sys, name, stream)


def reason_of(error: BaseException) -> str:
    """The reason that is sent for an error in users' code, or for a wrong value that it returned."""
    return (str(error) if isinstance(error, WrongValue) else described(error))[:MAX_TEXT]


def _private(descriptor: int, is_kept: bool = False) -> int:
    """Return a duplicate of the descriptor that no child process inherits, not even a forked one.

    Closes the original unless `is_kept`.
    """
    own = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    if not is_kept:
        os.close(descriptor)
    os.register_at_fork(after_in_child=lambda: os.close(own))
    return own
