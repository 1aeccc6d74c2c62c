"""Sends weights by broadcasts over one process group with all servers: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerGone, ServerRefused
from megatron_gvpo.servers.server import Server
from megatron_gvpo.weights.bucket import Bucket, TensorSpec
from megatron_gvpo.weights.group import Rendezvous, WeightGroup, group_address
from megatron_gvpo.weights.transport import (
    PushFailed,
    PushSettings,
    Transport,
    WeightReceiver,
    each,
    raise_failed,
)

POLL = 0.001  # seconds between two checks of a broadcast
LEAVE = 5.0  # seconds that a server has to leave a group


class GroupReceiver(WeightReceiver):
    """The calls to a server that form a process group with it."""

    def group_prefixes(self, rendezvous: Rendezvous) -> Sequence[str]:
        """The prefixes of the server ranks' keys in the group's store, outermost first; plugins add none."""
        return []

    @abstractmethod
    async def join(self, rendezvous: Rendezvous, rank_offset: int, timeout: float) -> None:
        """Form the process group, in which the server's first rank is `rank_offset`.

        Returns when all ranks of the group have joined.
        """

    @abstractmethod
    async def leave(self, rendezvous: Rendezvous, timeout: float) -> None: ...


class BroadcastReceiver(GroupReceiver):
    """The calls to a server that a broadcast of whole tensors needs."""

    @abstractmethod
    async def receive(self, specs: Sequence[TensorSpec], rendezvous: Rendezvous, timeout: float) -> None:
        """Take the broadcast of one bucket; returns when its tensors are loaded."""


class GroupTransport[Receiver: GroupReceiver](Transport):
    """Keeps the group from push to push while the servers are the same; forms a new one after any failure.

    A group in which anything failed is never used again: the sender completes even a small broadcast that a
    server refused, and the server would then read it as the data of the next one.
    """

    max_ctas: ClassVar[int | None] = None  # see Rendezvous

    def __init__(
        self,
        receiver: Callable[[Server], Receiver],
        address: str,
        backend: str,
        timeout: float,
        trainers: int = 1,
    ) -> None:
        """`trainers`: ranks of the trainer in the group; those of the servers follow them."""
        self._receiver, self._trainers = receiver, trainers
        self._address, self._backend, self._timeout = address, backend, timeout
        self._group: WeightGroup | None = None
        self._handles: list[ServerHandle] = []
        self._members: list[tuple[str, int]] = []  # (url, life) of the servers in the group, see _lives
        self._offsets: dict[str, int] = {}  # first rank in the group, by url
        self._version = -1
        self._wire_s = 0.0

    @classmethod
    def check(cls, settings: PushSettings) -> None:
        group_address(settings.rollout)

    @classmethod
    def create(cls, settings: PushSettings, receiver: Callable[[Server], Any]) -> Self:
        backend = "nccl" if settings.device.type == "cuda" else "gloo"
        rollout = settings.rollout
        return cls(receiver, group_address(rollout), backend, rollout.weights.timeout)

    @property
    def metrics(self) -> dict[str, float]:
        """`sync/wire_s`: seconds to bring the bytes of all buckets to the servers, without loading."""
        return {"sync/wire_s": self._wire_s}

    async def begin(self, handles: Sequence[ServerHandle], version: int) -> None:
        self._version, self._wire_s = version, 0.0
        async with self._whole_or_discarded():
            if self._group is None or self._members != _lives(handles):
                await self._discard()
                await self._meet(handles)
            await each(
                self._handles, lambda handle: self._receiver(handle.server).begin_update(self._timeout)
            )

    async def _deliver(
        self, wire: Tensor, post: Callable[[ServerHandle, Rendezvous], Awaitable[None]]
    ) -> None:
        """Broadcast `wire` and wait for every server's answer to `post`, both at once."""
        assert self._group is not None, "begin first"
        group, begin = self._group, time.monotonic()
        async with self._whole_or_discarded():
            posts = self._start(lambda handle: post(handle, group.rendezvous))
            try:
                work = group.broadcast(wire)
                while not work.is_completed():
                    # A server that refused never receives, so the broadcast would never complete.
                    self._raise_failed(posts)
                    if time.monotonic() > begin + self._timeout:
                        raise PushFailed(f"a broadcast took over {self._timeout:g} s", self._handles)
                    await asyncio.sleep(POLL)
                work.wait()
                self._wire_s += time.monotonic() - begin
                await asyncio.wait(posts)
            except RuntimeError as error:  # torch raises it when a rank dies during the broadcast
                await asyncio.wait(posts, timeout=5.0)
                self._raise_failed(posts)
                raise PushFailed(f"the broadcast failed: {error}", self._handles) from None
            finally:
                for task in posts:
                    task.cancel()
            self._raise_failed(posts)

    async def end(self) -> None:
        async with self._whole_or_discarded():
            version = str(self._version)
            await each(
                self._handles, lambda handle: self._receiver(handle.server).end_update(version, self._timeout)
            )

    async def close(self) -> None:
        await self._discard()

    async def _meet(self, handles: Sequence[ServerHandle]) -> None:
        self._handles, self._members = list(handles), _lives(handles)
        world = self._trainers
        self._offsets = {}
        for handle in handles:
            self._offsets[handle.server.url] = world
            try:
                world += (await handle.server.info(self._timeout)).processes
            except (ServerGone, ServerRefused) as error:  # the server ended after its last health check
                raise PushFailed(str(error), [handle]) from None
        self._group = group = self._new_group(world)

        async def join(handle: ServerHandle) -> None:
            receiver = self._receiver(handle.server)
            await receiver.join(group.rendezvous, self._offset(handle), self._timeout)

        joins = self._start(join)
        prefixes = self._receiver(handles[0].server).group_prefixes(group.rendezvous)
        connected = asyncio.create_task(self._connect(group, prefixes))
        await asyncio.wait([connected, *joins], return_when=asyncio.FIRST_EXCEPTION)
        self._raise_failed(joins)
        try:
            await connected
        except RuntimeError as error:
            raise PushFailed(f"the process group for the weights did not form: {error}", handles) from None
        await asyncio.wait(joins)
        self._raise_failed(joins)

    def _new_group(self, world: int) -> WeightGroup:
        """A group of `world` ranks, which have not met."""
        return WeightGroup(
            self._address, world, self._backend, min(60.0, self._timeout), self._timeout, self.max_ctas
        )

    async def _connect(self, group: WeightGroup, prefixes: Sequence[str]) -> None:
        """Join the group with all of the trainer's ranks; returns when all others have joined, too."""
        await asyncio.to_thread(group.connect, prefixes)

    def _offset(self, handle: ServerHandle) -> int:
        """The rank of the server's first process in the group."""
        return self._offsets[handle.server.url]

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
        leaves = self._start(lambda handle: self._receiver(handle.server).leave(group.rendezvous, LEAVE))
        group.close()
        await asyncio.gather(*leaves, return_exceptions=True)  # a dead server need not leave

    def _start(
        self, call: Callable[[ServerHandle], Awaitable[None]]
    ) -> dict[asyncio.Task[None], ServerHandle]:
        async def one(handle: ServerHandle) -> None:
            await call(handle)

        return {asyncio.create_task(one(handle)): handle for handle in self._handles}

    @staticmethod
    def _raise_failed(posts: dict[asyncio.Task[None], ServerHandle]) -> None:
        """Raise the errors of the posts that are done."""
        ended = [(handle, post.exception()) for post, handle in posts.items() if post.done()]
        raise_failed([(handle, error) for handle, error in ended if error is not None])


class Broadcast(GroupTransport[BroadcastReceiver]):
    """Broadcasts every bucket as it is."""

    async def send(self, bucket: Bucket) -> int:
        async def post(handle: ServerHandle, rendezvous: Rendezvous) -> None:
            await self._receiver(handle.server).receive(bucket.specs, rendezvous, self._timeout)

        await self._deliver(bucket.flat, post)
        return bucket.flat.nbytes


def _lives(handles: Sequence[ServerHandle]) -> list[tuple[str, int]]:
    """The URL of each server and how often it was lost: after a loss it needs another process group."""
    return [(handle.server.url, handle.losses) for handle in handles]
