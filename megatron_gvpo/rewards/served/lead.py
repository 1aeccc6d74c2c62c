"""Work of rank 0 with servers, which the other ranks follow."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

from megatron_gvpo.rewards.served.servers import Unanswered
from megatron_gvpo.rewards.served.verdict import Misfit
from megatron_gvpo.rollout import leader
from megatron_gvpo.rollout.leader import Command, Done, Failed, Wait, lead
from megatron_gvpo.sampling.engine import OnWait


def follow(begin: Callable[[], Command] | None, on_wait: OnWait = None) -> Any:
    """Wait for rank 0's work; its result, on every rank. `begin` is None on the other ranks. A collective.

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
    """Done, once the task has ended; Wait after a heartbeat; or Failed."""
    concurrent.futures.wait([task], timeout=leader.HEARTBEAT)
    if not task.done():
        return Wait()
    try:
        return Done(task.result())
    except (Misfit, Unanswered, OSError) as error:
        return Failed(str(error))
