"""Stands-in for rollout servers, and servers that are ready without a push, for tests."""

from __future__ import annotations

from megatron_gvpo.servers.handle import Pending, Receiving
from megatron_gvpo.servers.pool import ServerPool


def itself[S](server: S) -> S:
    """The receiver of a stand-in, which is server and receiver in one."""
    return server


def admit_at_once(pool: ServerPool, version: int) -> None:
    """Admit the pool's only server, in whatever state it is, without a word to it."""
    [handle] = pool.handles
    handle.to(Pending())
    handle.to(Receiving())
    pool.admit(handle, version)
