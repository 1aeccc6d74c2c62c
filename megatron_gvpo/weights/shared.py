"""Sends weights through memory that the trainer shares with servers on its own nodes.

This needs no process group, so it works for a trainer and a server on the same GPU, where NCCL does not. Each
rank of a server maps (CUDA IPC) the bucket of a trainer rank whose GPU it sees. If some rank of a server sees
no GPU of the trainer's, all its ranks map the same bytes in the node's shared memory. Rank 0 offers its own
memory, and relays (megatron_gvpo.weights.relay) offer that of the other ranks.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from megatron_gvpo.core.collectives import all_gather_msgpack, broadcast_msgpack
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.server import Server
from megatron_gvpo.weights.bucket import Bucket, TensorSpec
from megatron_gvpo.weights.node import NodeMemory, new_name, seen_by_all
from megatron_gvpo.weights.relay import ORDERS, Discover, EndPush, JoinStream, Relay, Relays, ShareBucket
from megatron_gvpo.weights.transport import (
    Follower,
    PushFailed,
    PushSettings,
    Transport,
    WeightReceiver,
    each,
)

# The location of a bucket's bytes: a file in shared memory; or the memory of GPUs, with a handle for each
# rank of the server (megatron_gvpo.weights.node.shared_storage).
SharedLocation = Path | list[dict[str, Any]]


class SharedReceiver(WeightReceiver):
    """The calls to a server that a push through shared memory needs."""

    @abstractmethod
    async def tell_gpus(self, file: Path, timeout: float) -> None:
        """Each rank of the server writes the UUIDs of the GPUs that it sees, as JSON, to `file`.SUFFIX."""

    @abstractmethod
    async def receive_shared(
        self, specs: Sequence[TensorSpec], location: SharedLocation, timeout: float
    ) -> None:
        """Load one bucket of tensors, whose bytes are at `location` one after another."""


class Home(NamedTuple):
    """The trainer ranks whose memory a server maps: 0 is rank 0, and the relays follow in their order."""

    file: int  # the trainer rank that owns the file on the server's node
    gpus: tuple[int, ...]  # trainer rank whose GPU each server rank maps; empty: they map the file


class Shared(Transport):
    """Offers rank 0's own `memory`, and that of the `relays`."""

    def __init__(
        self, receiver: Callable[[Server], SharedReceiver], timeout: float, memory: NodeMemory, relays: Relays
    ) -> None:
        self._receiver, self._timeout = receiver, timeout
        self._memory, self._relays = memory, relays
        self._handles: list[ServerHandle] = []
        self._homes: dict[str, Home] = {}  # memory that each server maps, by url
        self._numbers = itertools.count()
        self._version = -1

    @classmethod
    def create(cls, settings: PushSettings, receiver: Callable[[Server], Any]) -> Self:
        memory, store, relays = _meet(settings.device)
        timeout = settings.rollout.weights.timeout
        assert memory is not None, "rank 0 is the first of its node"
        return cls(receiver, timeout, memory, Relays(store, relays, timeout, ORDERS))

    @classmethod
    def follower(cls, settings: PushSettings) -> Follower | None:
        memory, store, _ = _meet(settings.device)
        if memory is None:
            return None
        return Relay(store, dist.get_rank(), memory, settings.rollout.weights.timeout)

    @property
    def metrics(self) -> dict[str, float]:
        """`sync/ipc`: the share of servers that mapped a GPU's memory; nothing without GPUs."""
        homes = [
            self._homes[handle.server.url] for handle in self._handles if handle.server.url in self._homes
        ]
        mapped = [len(home.gpus) > 0 for home in homes]
        return {"sync/ipc": sum(mapped) / len(mapped)} if mapped and self._memory.on_gpu else {}

    async def begin(self, handles: Sequence[ServerHandle], version: int) -> None:
        self._handles, self._version = list(handles), version
        await each(self._handles, lambda handle: self._receiver(handle.server).begin_update(self._timeout))
        if unknown := [handle for handle in self._handles if handle.server.url not in self._homes]:
            await self._find(unknown)
        self._relays.tell(JoinStream())

    async def send(self, bucket: Bucket) -> int:
        offers = await self._offers(bucket)

        async def post(handle: ServerHandle) -> None:
            home = self._homes[handle.server.url]
            location: SharedLocation = [offers[number]["handles"].pop() for number in home.gpus]
            await self._receiver(handle.server).receive_shared(
                bucket.specs, location or Path(offers[home.file]["file"]), self._timeout
            )

        try:
            await each(self._handles, post)
        except PushFailed as failure:  # the next attempt of the push uses host memory
            for url in (handle.server.url for handle in failure.handles):
                self._homes[url] = self._homes[url]._replace(gpus=())
            raise
        return bucket.flat.nbytes

    async def _offers(self, bucket: Bucket) -> list[dict[str, Any]]:
        """Offer the bucket in the memory of rank 0 and of the relays, as the servers' homes need it."""
        homes = [self._homes[handle.server.url] for handle in self._handles]
        mappings = Counter(number for home in homes for number in home.gpus)
        files = {home.file for home in homes if not home.gpus}
        own_order, *orders = (
            ShareBucket(mappings[number], number in files) for number in range(1 + len(self._relays))
        )
        # The relays get the order even if rank 0 has no memory for the bucket, because only then do they take
        # part in the stream's next collective, where rank 0 may be waiting for them.
        own_offer, relay_offers = await asyncio.gather(
            asyncio.to_thread(self._memory.offer, bucket.flat, own_order.handles, own_order.file),
            asyncio.to_thread(self._relays.ask, orders, "to offer a bucket"),
            return_exceptions=True,
        )
        for outcome in (own_offer, relay_offers):
            if isinstance(outcome, BaseException):
                raise outcome
        return [own_offer, *relay_offers]

    async def end(self) -> None:
        await each(
            self._handles,
            lambda handle: self._receiver(handle.server).end_update(str(self._version), self._timeout),
        )
        if self._memory.on_gpu:
            torch.cuda.ipc_collect()

    def over(self) -> None:
        self._relays.tell(EndPush())

    async def close(self) -> None:
        self._memory.close()

    async def _find(self, handles: Sequence[ServerHandle]) -> None:
        """Find each server's home. Its ranks write the GPUs that they see to files in their node's memory."""
        numbers = {handle.server.url: str(next(self._numbers)) for handle in handles}
        directory = self._memory.directory
        processes_of: dict[str, int] = {}  # ranks of each server, by url

        async def ask(handle: ServerHandle) -> None:
            await self._receiver(handle.server).tell_gpus(
                directory / f"{numbers[handle.server.url]}.told", self._timeout
            )
            processes_of[handle.server.url] = (await handle.server.info(self._timeout)).processes

        await each(handles, ask)
        orders = [Discover()] * len(self._relays)
        answers = await asyncio.to_thread(self._relays.ask, orders, "to look for servers")
        sightings = [self._memory.seen(), *answers]
        for handle in handles:
            url = handle.server.url
            self._homes[url] = self._home(handle, numbers[url], processes_of[url], sightings)

    def _home(
        self, handle: ServerHandle, number: str, processes: int, sightings: Sequence[Mapping[str, Any]]
    ) -> Home:
        """Choose the home of a server with `processes` ranks from what the trainer ranks' memories contain.

        `number` names the server's files there. Raises PushFailed if no node has a file of every rank.
        """
        gpu_lists = [seen["told"].get(number, []) for seen in sightings]
        file = next((owner for owner, ranks in enumerate(gpu_lists) if len(ranks) == processes), None)
        if file is None:
            seen_ranks = sum(map(len, gpu_lists))
            raise PushFailed(
                f"rollout.weights.transport=shared: {seen_ranks} of the {processes} rank(s) of "
                f"{handle.server.url} see {self._memory.directory} of a node of the trainer's; a server must "
                "be on one of them, as this user, with the same /dev/shm. For others use broadcast or disk",
                [handle],
            )
        by_gpu = {seen["gpu"]: owner for owner, seen in enumerate(sightings) if seen["gpu"]}
        common = [by_gpu[uuid] for uuid in seen_by_all(gpu_lists[file]) if uuid in by_gpu]
        gpus = [common[rank % len(common)] for rank in range(processes)] if common else []
        return Home(file, tuple(gpus))


def _meet(device: torch.device) -> tuple[NodeMemory | None, dist.Store, list[int]]:
    """Every rank opens the memory that it offers; a collective.

    Memory is offered by every rank with a GPU, or without GPUs by the first rank of every node. Returns this
    rank's memory, if it offers any, the store for the orders, and the ranks that are relays.
    """
    rank, name = dist.get_rank(), broadcast_msgpack(new_name())
    local_ranks = all_gather_msgpack(int(os.environ.get("LOCAL_RANK", "0")))
    offering = [r for r, local in enumerate(local_ranks) if local == 0 or torch.cuda.is_available()]
    memory = NodeMemory(name, device, first=local_ranks[rank] == 0) if rank in offering else None
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return memory, store, [r for r in offering if r != 0]
