"""Rank 0 leads: only it talks to the servers, and it sends every rank the next command.

While rank 0 waits for servers, it sends `Wait` once per heartbeat. The other ranks therefore wait on the CPU
for a few seconds at a time, never in a collective that could time out, and a colocated engine has the GPUs to
itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from megatron_gvpo.core.clock import event_loop
from megatron_gvpo.core.collectives import broadcast_msgpack, is_first_rank
from megatron_gvpo.core.errors import ConfigError, DataError, RolloutError
from megatron_gvpo.servers.http import ServerGone, open_session
from megatron_gvpo.servers.model_requests import Misfit, Unanswered

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from megatron_gvpo.types import OnWait


HEARTBEAT = 5.0  # seconds that the other ranks wait at most for a command of rank 0


class Messages[T]:
    """The messages that one rank may send another: frozen dataclasses, whose fields have msgpack's types.

    On the way a message is the name of its class and its fields. The sender and the receiver refuse any other
    message.
    """

    def __init__(self, *kinds: type[T]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: T) -> list[Any]:
        kind: Any = type(message)
        if kind not in self._kinds.values():
            raise AssertionError(f"{message!r} is not one of {', '.join(self._kinds)}")
        return [kind.__name__, *(getattr(message, field.name) for field in fields(kind))]

    def decode(self, sent: list[Any]) -> T:
        match sent:
            case [str(name), *values] if name in self._kinds:
                return self._kinds[name](*values)
        raise AssertionError(f"another rank sent {sent!r}, which is not one of {', '.join(self._kinds)}")


@dataclass(frozen=True)
class Wait:
    """Nothing has happened: the ranks wait for the next command."""


@dataclass(frozen=True)
class Push:
    """A server needs the current weights: all ranks take part in a push."""


@dataclass(frozen=True)
class Done:
    """The work has ended well; `payload` is its result, in msgpack's types."""

    payload: Any = None


@dataclass(frozen=True)
class Failed:
    """The work has failed: every rank raises `error`."""

    problem: str
    misconfigured: bool = False  # the error is a ConfigError, else a RolloutError

    @classmethod
    def by(cls, error: ConfigError | RolloutError) -> Self:
        return cls(str(error), isinstance(error, ConfigError))

    @property
    def error(self) -> ConfigError | RolloutError:
        return ConfigError(self.problem) if self.misconfigured else RolloutError(self.problem)


Command = Wait | Push | Done | Failed
COMMANDS: Messages[Command] = Messages(Wait, Push, Done, Failed)


def lead(next_command: Callable[[], Command] | None) -> Command:
    """Rank 0's next command, on every rank. `next_command` is None on the other ranks. A collective."""
    sent = None if next_command is None else COMMANDS.encode(next_command())
    return COMMANDS.decode(broadcast_msgpack(sent))


# An asyncio event loop in its own thread, for callers that are not asynchronous.


class BackgroundLoop:
    """Runs coroutines in a thread beside the caller's; `close` cancels those that still run."""

    def __init__(self, name: str) -> None:
        self._loop = event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the coroutine; the future gives its result or raises its error."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to its end and return its result; an interrupted wait cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def cancel_all(self) -> None:
        """Cancel all coroutines and wait until they have ended."""
        self.run(_cancel_others())

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self.cancel_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Work of rank 0 with servers, which the other ranks follow.


def follow(begin: Callable[[], Command] | None, on_wait: OnWait = None) -> Any:
    """Return the result of rank 0's work on every rank. `begin` is None on the other ranks. A collective.

    Raises ConfigError, RolloutError.
    """
    while True:
        match lead(begin):
            case Done(payload):
                return payload
            case Failed() as failed:
                raise failed.error
            case _:
                if on_wait is not None:
                    on_wait()


def result_of(task: concurrent.futures.Future[Any]) -> Command:
    """Return Done once the task has ended, Wait after a heartbeat, or Failed."""
    concurrent.futures.wait([task], timeout=HEARTBEAT)
    if not task.done():
        return Wait()
    try:
        return Done(task.result())
    except (ConfigError, RolloutError) as error:
        return Failed.by(error)
    except (Misfit, Unanswered, ServerGone, OSError) as error:
        return Failed(str(error))


class ModelClient(ABC):
    """Rank 0's requests to servers of models beside the policy, whose answers all ranks get.

    A context manager: servers that it started end with it. Every rank calls every method.
    """

    def __init__(self, name: str) -> None:
        self._name = name  # name of the thread that sends the requests
        self._opened = ExitStack()
        self._loop: BackgroundLoop | None = None  # exists on rank 0, after the servers have started
        self._ready: concurrent.futures.Future[None]

    @abstractmethod
    def start_servers(self, session: ClientSession) -> Coroutine[Any, Any, None]:
        """Start or find the servers, on rank 0; returns a coroutine that waits for them, and checks them.

        Everything that must be closed later is added to the stack `_opened`. Raises ConfigError, DataError.
        """

    def __enter__(self) -> Self:
        """Start the servers. Raises ConfigError, RolloutError."""
        try:
            follow(self._open if is_first_rank() else None)
        except BaseException:  # Python does not call __exit__ then
            self._opened.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def answer(
        self,
        ask: Callable[[], Coroutine[Any, Any, Any]],
        on_wait: OnWait,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """The result of `ask()` on rank 0, in msgpack's types, on every rank. `meanwhile` runs on every rank.

        Raises ConfigError, RolloutError.
        """
        task = None if self._loop is None else self._loop.submit(ask())
        try:
            if meanwhile is not None:
                meanwhile()
            return follow(None if task is None else partial(result_of, task), on_wait)
        finally:
            if task is not None:
                task.cancel()  # has an effect only if something was raised

    def _open(self) -> Command:
        """On rank 0: open the parts that are not open yet, and wait for the servers."""
        try:
            if self._loop is None:
                loop = BackgroundLoop(self._name)
                self._opened.callback(loop.close)
                session = loop.run(open_session())
                self._opened.callback(lambda: loop.run(session.close()))
                check = self.start_servers(session)
                self._opened.callback(loop.cancel_all)
                self._loop, self._ready = loop, loop.submit(check)
            return result_of(self._ready)
        except (ConfigError, DataError) as error:
            return Failed(str(error), misconfigured=True)
