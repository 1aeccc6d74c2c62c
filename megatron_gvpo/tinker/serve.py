"""Runs the server: HTTP in a thread of rank 0, the operations in the main thread of every rank."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any

import torch.distributed as dist
from aiohttp import web

from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.signals import handled_by, stopping_signals
from megatron_gvpo.settings.tinker import TinkerConfig
from megatron_gvpo.tinker.app import TinkerApp
from megatron_gvpo.tinker.operations import Operation, Operations, Outcome
from megatron_gvpo.tinker.queue import FairQueue, QueuedOperation
from megatron_gvpo.tinker.served_model import ServedModel
from megatron_gvpo.tinker.wire import Refusal

log = logging.getLogger(__name__)

# Seconds between two messages of waiting ranks, so that no wait reaches a collective's time limit.
IDLE_SECONDS = 2.0
_STOP = {"kind": "stop"}


def serve(config: TinkerConfig) -> None:
    """Serve until a signal asks to stop; every rank calls this. Raises ConfigError, RolloutError."""
    operations = Operations(config)
    stop = threading.Event()
    with _stopping(stop), operations.sampler:
        if dist.get_rank() != 0:
            _follow(operations)
            return
        queue = FairQueue()
        with _http(config, TinkerApp(config, ServedModel.of(config, operations.sampler.positions), queue)):
            _lead(operations, queue, stop)


def _follow(operations: Operations) -> None:
    """Carry out the operations that rank 0 sends, until it sends a stop."""
    while (operation := broadcast_msgpack(None)) != _STOP:
        with suppress(Refusal):  # rank 0 sends the refusal to the client
            operations.run(operation)


def _lead(operations: Operations, queue: FairQueue, stop: threading.Event) -> None:
    """Send the jobs' operations to all ranks, carry them out, and return their outcomes to the jobs."""
    while not stop.is_set():
        jobs = queue.take(IDLE_SECONDS)
        operation = broadcast_msgpack(joined(jobs))
        try:
            outcomes: Sequence[Outcome | Exception] = divided(jobs, operations.run(operation))
        except Refusal as refusal:
            outcomes = [refusal] * len(jobs)
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.finish(outcome)
    broadcast_msgpack(_STOP)


def joined(jobs: Sequence[QueuedOperation]) -> Operation:
    """The operation of a single job, or of sampling jobs that run together; idle without jobs."""
    if not jobs:
        return {"kind": "idle"}
    first = jobs[0].operation
    if len(jobs) == 1:
        return first
    return {**first, "orders": [order for job in jobs for order in job.operation["orders"]]}


def divided(jobs: Sequence[QueuedOperation], outcome: Outcome) -> list[Outcome]:
    """Divide the outcome of an operation into the outcomes of its jobs."""
    if not jobs:
        return []
    return outcome["answers"] if jobs[0].operation["kind"] == "sample" else [outcome]


@contextmanager
def _http(config: TinkerConfig, app: TinkerApp) -> Iterator[None]:
    """Context in which the application listens. Raises ConfigError for an address that it cannot have."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tinker-http", daemon=True)
    thread.start()
    # Clients may wait 20 s for a result (retrieve_future). At the server's end their requests are cut off.
    runner = web.AppRunner(app.application(), access_log=None, shutdown_timeout=0.1)
    serving = config.serve

    async def start() -> Any:
        await runner.setup()
        await web.TCPSite(runner, serving.address, serving.port).start()
        return runner.addresses[0]

    try:
        address = asyncio.run_coroutine_threadsafe(start(), loop).result()
    except (OSError, UnicodeError) as error:  # UnicodeError: a text that cannot be a host's name
        raise ConfigError(f"serve.address={serving.address}, serve.port={serving.port}: {error}") from None
    print(f"serving {config.name} at http://{address[0]}:{address[1]}", flush=True)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)


def _stopping(stop: threading.Event) -> AbstractContextManager[None]:
    """Context in which signals ask for a stop; a second one ends the process at once."""

    def note(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    return handled_by(note, stopping_signals())
