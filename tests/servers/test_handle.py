"""A server's states: which follow which, and what a loss takes with it."""

import asyncio
from itertools import product
from typing import Any

import pytest

from megatron_gvpo.servers.handle import (
    TRANSITIONS,
    Loaded,
    Lost,
    Pending,
    Receiving,
    ServerHandle,
    Serving,
    State,
)
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.settings.servers import ServersConfig


class Named:
    url = "http://server"


STATES: list[State] = [Lost("gone"), Pending(), Receiving(), Loaded(3), Serving(3)]
# Every path of the story that handle.py draws; all other changes are faults of the pool.
LEGAL = {
    (Lost, Lost),
    (Lost, Pending),
    (Pending, Lost),
    (Pending, Pending),
    (Pending, Receiving),
    (Receiving, Lost),
    (Receiving, Pending),
    (Receiving, Loaded),
    (Receiving, Serving),
    (Loaded, Lost),
    (Loaded, Pending),
    (Loaded, Serving),
    (Serving, Lost),
    (Serving, Pending),
}


@pytest.mark.parametrize(("before", "after"), product(STATES, STATES))
def test_a_server_changes_its_state_as_the_table_says(before: State, after: State):
    handle = ServerHandle(Named(), state=before)  # type: ignore[arg-type]
    if (type(before), type(after)) in LEGAL:
        handle.to(after)
        assert handle.state == after
    else:
        with pytest.raises(AssertionError, match="http://server: no server goes from"):
            handle.to(after)
        assert handle.state == before
    assert sum(map(len, TRANSITIONS.values())) == len(LEGAL)


def test_a_lost_server_loses_its_version_its_group_and_its_requests():
    async def run() -> None:
        handle = ServerHandle(Named(), state=Receiving())  # type: ignore[arg-type]
        handle.to(Serving(4))
        assert handle.has(4) and not handle.has(3) and handle.version == 4
        handle.to(Pending())
        assert handle.version == 4 and not handle.has(4), "a delta goes to a server that waits, too"
        call: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(60))
        handle.calls.add(call)
        handle.to(Lost("gone"))
        assert (handle.version, handle.losses) == (-1, 1)
        await asyncio.wait([call], timeout=5.0)
        assert call.cancelled()

    asyncio.run(run())


def test_a_server_that_was_lost_during_a_push_is_not_admitted_by_it():
    """Fails on the old code: the server was back, without the weights, when the push ended."""
    pool = ServerPool([Named()], ServersConfig(), [], lambda _: None)  # type: ignore[list-item]
    [handle] = pool.handles
    for state in (Pending(), Receiving(), Lost("gone"), Pending()):
        handle.to(state)
    pool.admit(handle, 1)
    assert handle.state == Pending() and pool.wants_weights
