"""Weights by broadcast over one process group with all servers: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from torch import Tensor

from megatron_gvpo.rollout.http import ServerGone, ServerRefused
from megatron_gvpo.rollout.pool import Member
from megatron_gvpo.rollout.server import Rendezvous
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.group import WeightGroup
from megatron_gvpo.weights.transport import PushFailed

POLL = 0.001  # seconds between looks at a broadcast


class Broadcast:
    """Keeps the group between pushes while the same servers are there; after any failure it makes a new one.

    A small broadcast that a server refused completes at the sender all the same, and would become the next
    one's data: so a group in which anything went wrong is never used again.
    """

    def __init__(self, address: str, backend: str, timeout: float) -> None:
        self._address, self._backend, self._timeout = address, backend, timeout
        self._group: WeightGroup | None = None
        self._members: list[Member] = []
        self._version = -1
        self._wire_s = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Seconds until the servers had the bytes, of all buckets; they load them after that."""
        return {"sync/wire_s": self._wire_s}

    async def begin(self, members: Sequence[Member], version: int) -> None:
        self._version, self._wire_s = version, 0.0
        async with self._whole_or_discarded():
            if self._group is None or list(members) != self._members or any(m.regroup for m in members):
                await self._discard()
                await self._meet(members)
            await self._all(lambda m: m.server.begin_update(self._timeout))

    async def send(self, bucket: Bucket) -> int:
        await self._deliver(
            bucket.flat, lambda m, meeting: m.server.receive(bucket.specs, meeting, self._timeout)
        )
        return bucket.flat.nbytes

    async def _deliver(self, wire: Tensor, post: Callable[[Member, Rendezvous], Awaitable[None]]) -> None:
        """Broadcast `wire` while every server's answer to `post` is awaited."""
        assert self._group is not None, "begin first"
        group, begin = self._group, time.monotonic()
        async with self._whole_or_discarded():
            posts = self._start(lambda m: post(m, group.meeting))
            try:
                work = group.broadcast(wire)
                while not work.is_completed():
                    # A server that refused never receives: without this look the broadcast would wait for
                    # ever.
                    self._raise_failed(posts)
                    if time.monotonic() > begin + self._timeout:
                        raise PushFailed(f"a broadcast took over {self._timeout:g} s", self._members)
                    await asyncio.sleep(POLL)
                work.wait()
                self._wire_s += time.monotonic() - begin
                await asyncio.wait(posts)
            except RuntimeError as error:  # torch's, of a rank that went away in the middle
                await asyncio.wait(posts, timeout=5.0)
                self._raise_failed(posts)
                raise PushFailed(f"the broadcast failed: {error}", self._members) from None
            finally:
                for each in posts:
                    each.cancel()
            self._raise_failed(posts)

    async def end(self) -> None:
        async with self._whole_or_discarded():
            await self._all(lambda m: m.server.end_update(str(self._version), self._timeout))

    def over(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        await self._discard()

    def prefixes(self, member: Member, meeting: Rendezvous) -> Sequence[str]:
        """What a server's ranks put before their keys in the store."""
        return member.server.group_prefixes(meeting)

    async def join(self, member: Member, meeting: Rendezvous, rank_offset: int) -> None:
        await member.server.join(meeting, rank_offset, self._timeout)

    async def leave(self, member: Member, meeting: Rendezvous) -> None:
        await member.server.leave(meeting, 5.0)

    async def _meet(self, members: Sequence[Member]) -> None:
        self._members = list(members)
        processes = []
        for member in members:
            try:
                processes.append((await member.server.facts(self._timeout)).processes)
            except (ServerGone, ServerRefused) as error:  # it died since it was last looked at
                raise PushFailed(str(error), [member]) from None
        offsets = [1 + sum(processes[:i]) for i in range(len(processes))]
        self._group = group = WeightGroup(
            self._address, 1 + sum(processes), self._backend, min(60.0, self._timeout), self._timeout
        )
        joins = self._start(lambda m: self.join(m, group.meeting, offsets[self._members.index(m)]))
        prefixes = self.prefixes(members[0], group.meeting)
        connected = asyncio.create_task(asyncio.to_thread(group.connect, prefixes))
        await asyncio.wait([connected, *joins], return_when=asyncio.FIRST_EXCEPTION)
        self._raise_failed(joins)
        try:
            await connected
        except RuntimeError as error:
            raise PushFailed(f"the process group for the weights did not form: {error}", members) from None
        await asyncio.wait(joins)
        self._raise_failed(joins)
        for member in members:
            member.regroup = False

    @contextlib.asynccontextmanager
    async def _whole_or_discarded(self) -> AsyncIterator[None]:
        try:
            yield
        except (PushFailed, asyncio.CancelledError):
            await self._discard()
            raise

    async def _discard(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        leaves = self._start(lambda m: self.leave(m, group.meeting))
        group.close()
        await asyncio.gather(*leaves, return_exceptions=True)  # a server that has gone need not leave

    def _start(self, call: Callable[[Member], Awaitable[None]]) -> dict[asyncio.Task[None], Member]:
        async def one(member: Member) -> None:
            await call(member)

        return {asyncio.create_task(one(m)): m for m in self._members}

    async def _all(self, call: Callable[[Member], Awaitable[None]]) -> None:
        posts = self._start(call)
        await asyncio.wait(posts)
        self._raise_failed(posts)

    @staticmethod
    def _raise_failed(posts: dict[asyncio.Task[None], Member]) -> None:
        failed = {post: m for post, m in posts.items() if post.done() and post.exception() is not None}
        for post in failed:
            if not isinstance(post.exception(), ServerGone | ServerRefused):
                post.result()
        if failed:
            raise PushFailed("; ".join(str(post.exception()) for post in failed), list(failed.values()))
