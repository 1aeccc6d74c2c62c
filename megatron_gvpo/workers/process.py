"""The trainer's side of a process that runs users' code: starts it, sends orders, reads replies, ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import wait
from types import ModuleType

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.workers.messages import (
    CallError,
    CallResult,
    Cancel,
    Cause,
    Function,
    Importing,
    Load,
    Order,
    Ready,
    RunProgram,
    Step,
    Unloadable,
    WireError,
    receive_reply,
    send_order,
)
from megatron_gvpo.workers.output import Output, Printout
from megatron_gvpo.workers.reaper import PATIENCE

START = 600.0  # seconds in which a process must import its functions
NOTICE = 0.5  # seconds between two notices that a function imports a module
_AGAIN = 0.05  # seconds until an order is sent again after the socket was full


class WorkerProcess:
    """A process under a reaper, the socket to it, and its output. The caller waits for `descriptors`.

    `handler` is the module that serves its calls (`worker.py`), `section` the configuration's section that
    errors name, and `files` the contents of users' files at the start of the run. `notice` is the time in
    seconds between two Importing messages.
    """

    def __init__(
        self,
        handler: ModuleType,
        section: str,
        functions: Sequence[Function],
        files: Mapping[str, bytes],
        printout: Printout,
        notice: float = NOTICE,
    ) -> None:
        self.channel, channel_of_worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end, leash = os.pipe()
        self._leash: int | None = leash
        output, output_of_worker = os.pipe()
        self.output = Output(output, printout)
        # -P: the current directory is not the first in which the process looks for modules (see `work`).
        reaper = [sys.executable, "-P", "-u", "-m", "megatron_gvpo.workers.reaper"]
        try:
            self._process = subprocess.Popen(
                [*reaper, str(channel_of_worker.fileno()), str(end), handler.__name__],
                pass_fds=[channel_of_worker.fileno(), end],
                stdin=subprocess.DEVNULL,
                stdout=output_of_worker,
                stderr=output_of_worker,
                start_new_session=True,
            )
        finally:
            channel_of_worker.close()
            os.close(end)
            os.close(output_of_worker)
        self.is_ready = False  # the worker has loaded its functions
        self.overlaps = False  # several calls may run at once
        self._section, self._functions = section, functions
        self._start_ends = running_seconds() + START
        try:
            # Python also ignores entries of other types.
            path = [entry for entry in sys.path if isinstance(entry, str)]
            send_order(self.channel, Load(path, dict(files), list(functions), notice))
        except ConnectionError:
            pass  # the worker has ended; `replies` reports it
        except (OSError, WireError) as error:
            self.stop()
            raise ConfigError(f"{section}: a worker cannot be told its functions: {error}") from None

    @property
    def pid(self) -> int:
        """The process id of the reaper, whose child the worker is."""
        return self._process.pid

    def descriptors(self) -> list[int]:
        """The descriptors from which its replies and its output come."""
        output = self.output.descriptor
        return [self.channel.fileno(), *([] if output is None else [output])]

    def send(self, order: Order) -> None:
        """Raises BlockingIOError if the process does not read, another OSError if it has ended, WireError."""
        send_order(self.channel, order)

    def replies(self) -> Iterator[CallResult | CallError | Importing]:
        """Show the process's output, and return the replies that have arrived.

        Raises ConfigError if the functions cannot be loaded, or not in time; WireError for a message that is
        not the worker's; EOFError and OSError if the process has ended.
        """
        self.output.drain()
        while (reply := receive_reply(self.channel)) is not None:
            match reply:
                case Ready(overlaps) if not self.is_ready:
                    self.is_ready, self.overlaps = True, overlaps
                case Unloadable(i, reason) if not self.is_ready and 0 <= i < len(self._functions):
                    raise ConfigError(f"{self._functions[i].key}: {reason}")
                case CallResult() | CallError() | Importing() if self.is_ready:
                    yield reply
                case _:
                    raise WireError(f"{type(reply).__name__} out of turn")
        if not self.is_ready and running_seconds() > self._start_ends:
            raise ConfigError(
                f"{self._section}: a worker was not ready after {START:g} seconds: importing {self._names} "
                "takes longer, or waits for something"
            )

    def wait_ready(self) -> None:
        """Wait until the functions are loaded.

        Raises ConfigError if they cannot be loaded, or not in time.
        """
        while not self.is_ready:
            wait(self.descriptors(), min(1.0, START))  # not select, which takes no descriptor above 1,023
            try:
                for _ in self.replies():
                    pass
            except WireError as error:
                raise ConfigError(
                    f"{self._section}: a worker did not start: {wrong_message(error)}"
                ) from None
            except (EOFError, OSError):
                raise ConfigError(f"{self._section}: {self.end_of_start(self.stop(PATIENCE))}") from None

    @property
    def _names(self) -> str:
        return ", ".join(function.spec for function in self._functions) or "its functions"

    def end_of_start(self, code: int) -> str:
        """The problem of a process that has ended with this exit code before it was ready."""
        return f"a worker ended while it imported {self._names} ({how_it_ended(code)})"

    def seconds_to_start(self) -> float:
        """Return the seconds that the process may still take to start."""
        return max(0.0, self._start_ends - running_seconds())

    def stop(self, patience: float = 0.0) -> int:
        """End the process and its descendants after `patience` seconds; its exit code (-n: signal n)."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        if self._leash is not None:
            with suppress(OSError):
                os.write(self._leash, b"\n")
            os.close(self._leash)
            self._leash = None
        try:
            code = self._process.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:  # a user has stopped the reaper
            self._process.kill()
            code = self._process.wait()
        self.output.drain()
        self.output.close()
        self.channel.close()
        return code


class CallFailed(Exception):  # noqa: N818 - it is not a fault of this program
    """A call has no value.

    "raised": the user's code raised or returned a wrong value. "late": it took too long. "ended": the program
    ended its process. `is_gone`: the worker process itself ended, or was ended; another has to be started.
    """

    def __init__(
        self,
        reason: str,
        cause: Cause = "ended",
        is_gone: bool = False,
    ) -> None:
        super().__init__(reason)
        self.cause, self.is_gone = cause, is_gone


class AsyncWorkerProcess(WorkerProcess):
    """A worker process whose calls are awaited, several at once, in one event loop."""

    def __init__(
        self,
        handler: ModuleType,
        function: Function,
        files: Mapping[str, bytes],
        printout: Printout,
    ) -> None:
        super().__init__(handler, "rollout.conversation", [function], files, printout)
        self._numbers = count()
        self._results: dict[int, asyncio.Future[CallResult]] = {}  # calls that wait for a result, by number
        self._watched = set[int]()  # descriptors that the event loop watches
        self._ending: asyncio.Task[None] | None = None

    @property
    def is_gone(self) -> bool:
        """True if the process has ended, or is being ended."""
        return self._ending is not None

    @property
    def calls(self) -> int:
        """The number of calls that wait for a result."""
        return len(self._results)

    async def ready(self) -> None:
        """Wait until the function is loaded, in a run that has begun.

        Raises RolloutError if it cannot be loaded.
        """
        try:
            await asyncio.to_thread(self.wait_ready)
        except ConfigError as problem:
            raise RolloutError(str(problem)) from None

    @contextmanager
    def call(self) -> Iterator[tuple[int, asyncio.Future[CallResult]]]:
        """A new call's number, and a future for its result or CallFailed. Replies are received inside."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        result: asyncio.Future[CallResult] = loop.create_future()
        self._results[number] = result
        if not self.is_gone:
            self._watch(loop)
        try:
            yield number, result
        finally:
            del self._results[number]
            if result.done() and not result.cancelled():
                result.exception()  # mark the error as retrieved, even if no caller has waited for it
            if not self._results:
                self._unwatch(loop)

    async def send_when_free(self, order: Step | RunProgram) -> None:
        """Send the order as soon as the process reads. Raises CallFailed if the process has ended."""
        while not self.is_gone:
            try:
                return self.send(order)
            except BlockingIOError:
                await asyncio.sleep(_AGAIN)
            except OSError as error:
                self.end(f"its process cannot be asked: {error}")
        assert self._ending is not None
        await self._ending
        result = self._results[order.call]
        if result.done():
            result.result()  # raises the error with which the process ended
        raise CallFailed("its process had ended before", is_gone=True)

    def cancel(self, numbers: list[int]) -> None:
        """Cancel these conversations or programs, as soon as the process reads."""
        with suppress(OSError):
            try:
                self.send(Cancel(numbers))
            except BlockingIOError:
                asyncio.get_running_loop().call_later(_AGAIN, self.cancel, numbers)

    def end(self, reason: str | None) -> asyncio.Task[None]:
        """End the process. All its calls fail, with the reason, or else with how the process ended."""
        if self._ending is None:
            loop = asyncio.get_running_loop()
            self._unwatch(loop)
            self._ending = loop.create_task(self._fail_all(reason))
        return self._ending

    async def _fail_all(self, reason: str | None) -> None:
        patience = PATIENCE if reason is None else 0.0
        code = await asyncio.get_running_loop().run_in_executor(None, self.stop, patience)
        if reason is None:
            by_kernel = " (perhaps by the kernel, for memory)" if code == -signal.SIGKILL else ""
            reason = f"it ended its process ({how_it_ended(code)}{by_kernel})"
        for result in self._results.values():
            if not result.done():
                result.set_exception(CallFailed(reason, is_gone=True))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        for descriptor in set(self.descriptors()) - self._watched:
            loop.add_reader(descriptor, self._take, loop)
            self._watched.add(descriptor)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._watched:
            loop.remove_reader(self._watched.pop())

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        """Show the process's output, and give each reply to its caller."""
        try:
            for reply in self.replies():
                result = self._results.get(reply.call)
                if result is None or result.done():
                    continue  # no caller waits for this result any more
                match reply:
                    case CallResult():
                        result.set_result(reply)
                    case CallError(_, reason, cause):
                        result.set_exception(CallFailed(reason, cause))
        except WireError as error:
            self.end(wrong_message(error))
        except (EOFError, OSError):
            self.end(None)
        for descriptor in self._watched - set(self.descriptors()):  # the process has closed its output
            loop.remove_reader(descriptor)
            self._watched.discard(descriptor)


def wrong_message(error: WireError) -> str:
    """The problem of a process that has sent a message which the worker does not send."""
    return f"its process sent a message that is none of the worker's ({error})"


def how_it_ended(code: int) -> str:
    """An exit code as text."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
