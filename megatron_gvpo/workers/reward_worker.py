"""The process in which reward functions run; `guard.py` starts it.

It answers job by job, so that the trainer always knows which job took it down. It must not import torch, so
that it starts fast and stays small.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron_gvpo.core.real_number import NoNumberError, real_number
from megatron_gvpo.core.user_functions import described, hold
from megatron_gvpo.workers.guard import SIGNALS
from megatron_gvpo.workers.messages import (
    HUNG_UP,
    Failed,
    Importing,
    Job,
    Ready,
    Reply,
    Scored,
    Unloadable,
    WireError,
    receive_jobs,
    receive_setup,
    send_reply,
    unpack_job,
)
from megatron_gvpo.workers.reward_functions import load_reward

_PRIVATE = 200  # descriptors from here on are the worker's: no function that counts from 3 meets them


def work(channel: int) -> None:
    """Answer the trainer's orders until it hangs up."""
    begin_work()
    _Worker(private(channel), private(1, keep=True)).work()


def begin_work() -> None:
    """Set the signals' handlers of a worker's process."""
    for number in SIGNALS:  # handlers, because processes that a reward starts would inherit SIG_IGN
        signal.signal(number, lambda *_: None)
    faulthandler.enable()


def private(descriptor: int, keep: bool = False) -> int:
    """A duplicate that no process inherits, not even a forked one."""
    own = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _PRIVATE)
    if not keep:
        os.close(descriptor)
    os.register_at_fork(after_in_child=lambda: os.close(own))
    return own


class _Worker:
    def __init__(self, channel: int, output: int) -> None:
        self._channel, self._output = socket.socket(fileno=channel), output
        self._process = os.getpid()
        self._running: int | None = None  # the job whose function is running
        self._announced: int | None = None  # the component whose output comes

    def work(self) -> None:
        try:
            setup = receive_setup(self._channel)
            sys.path += [entry for entry in setup.path if entry not in sys.path]
            hold(setup.files)
            functions = []
            for index, component in enumerate(setup.components):
                self._announce(index)
                try:
                    functions.append(load_reward(component))
                except ValueError as error:
                    return self._send(Unloadable(index, str(error)))
            threading.Thread(target=self._tell_of_imports, args=(setup.notice,), daemon=True).start()
            self._send(Ready())
            while True:
                for job in receive_jobs(self._channel):
                    self._announce(job.component)
                    self._running = job.number
                    reply = _evaluate(functions[job.component], job)
                    if os.getpid() != self._process:  # the function has forked, and its child returned
                        os._exit(0)
                    self._running = None
                    self._send(reply)
        except EOFError:
            pass  # the pool is gone
        except (OSError, WireError):
            os._exit(HUNG_UP)

    def _send(self, reply: Reply) -> None:
        send_reply(self._channel, reply)

    def _announce(self, component: int) -> None:
        """Mark in the output that the next lines are this component's."""
        if component != self._announced:
            self._announced = component
            with suppress(OSError):
                os.write(self._output, b"\0%d\0" % component)

    def _tell_of_imports(self, seconds: float) -> None:
        """Importing a module counts as the worker's start, not as the function's time."""
        main = threading.main_thread().ident
        assert main is not None
        while True:
            time.sleep(seconds)
            if (job := self._running) is not None and _imports(main):
                with suppress(OSError):
                    self._send(Importing(job))


def _imports(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _evaluate(function: Callable[..., Any], job: Job) -> Scored | Failed:
    """The reward, or the reason why there is none; whatever the function does that leaves the process."""
    try:
        value = function(*unpack_job(job))
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return Scored(job.number, real_number(value))
    except NoNumberError as error:
        return Failed(job.number, f"it returned {error}")
    except BaseException as error:
        return Failed(job.number, described(error))
