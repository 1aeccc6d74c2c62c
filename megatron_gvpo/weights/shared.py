"""Weights through memory that trainer and servers share, for servers on the trainer's own nodes.

It takes no process group, so it serves where trainer and server share a GPU, which NCCL refuses. A server
that sees the GPU of the first rank of its node maps the bucket there (CUDA IPC); the others map the same
bytes in the node's shared memory. On nodes other than rank 0's a relay offers them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_gvpo.rollout.fleet import Member
from megatron_gvpo.rollout.server import SharedPlace
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.ipc import sees
from megatron_gvpo.weights.node import NodeMemory
from megatron_gvpo.weights.relay import Relays
from megatron_gvpo.weights.transport import PushFailed, each


class Home(NamedTuple):
    """Where a server is: the number of its node, and how many handles of the GPU's memory it takes there."""

    node: int
    handles: int


class Shared:
    """`memory` is of rank 0's node, which is node 0; `relays` offer that of the others."""

    def __init__(self, timeout: float, memory: NodeMemory, relays: Relays) -> None:
        self._timeout, self._memory, self._relays = timeout, memory, relays
        self._members: list[Member] = []
        self._homes: dict[str, Home] = {}  # by url
        self._numbers = itertools.count()
        self._version = -1

    @property
    def metrics(self) -> dict[str, float]:
        """The share of the servers that mapped a GPU's memory."""
        mapped = [self._homes[m.server.url].handles > 0 for m in self._members if m.server.url in self._homes]
        return {"sync/ipc": sum(mapped) / len(mapped)} if mapped and self._memory.on_gpu else {}

    async def begin(self, members: Sequence[Member], version: int) -> None:
        self._members, self._version = list(members), version
        await each(self._members, lambda m: m.server.begin_update(self._timeout))
        if unknown := [m for m in self._members if m.server.url not in self._homes]:
            await self._find(unknown)
        self._relays.tell({"do": "stream"})

    async def send(self, bucket: Bucket) -> int:
        wanted: list[dict[str, Any]] = [
            {"do": "offer", "handles": 0, "file": False} for _ in range(1 + len(self._relays))
        ]
        for node, handles in (self._homes[m.server.url] for m in self._members):
            wanted[node]["handles"] += handles
            wanted[node]["file"] |= handles == 0
        mine = wanted[0]
        offers = [await asyncio.to_thread(self._memory.offer, bucket.flat, mine["handles"], mine["file"])]
        offers += await self._ask(wanted[1:], "to offer a bucket to the servers of its node")

        async def post(member: Member) -> None:
            node, handles = self._homes[member.server.url]
            place: SharedPlace = [offers[node]["handles"].pop() for _ in range(handles)]
            place = place if handles else Path(offers[node]["file"])
            await member.server.receive_shared(bucket.specs, place, self._timeout)

        try:
            await each(self._members, post)
        except PushFailed as failure:  # the next attempt goes by host memory
            for url in (m.server.url for m in failure.members):
                self._homes[url] = self._homes[url]._replace(handles=0)
            raise
        return bucket.flat.nbytes

    async def end(self) -> None:
        await each(self._members, lambda m: m.server.end_update(str(self._version), self._timeout))
        if self._memory.on_gpu:
            torch.cuda.ipc_collect()

    def over(self) -> None:
        self._relays.tell({"do": "over"})

    async def close(self) -> None:
        self._memory.close()

    async def _find(self, members: Sequence[Member]) -> None:
        """Which node's memory each server sees, and whether it sees its GPU: they say so in files there."""
        numbers = {member.server.url: str(next(self._numbers)) for member in members}
        file = self._memory.directory

        async def ask(member: Member) -> None:
            await member.server.tell_gpus(file / f"{numbers[member.server.url]}.told", self._timeout)

        await each(members, ask)
        look = [{"do": "look"}] * len(self._relays)
        nodes = [self._memory.seen(), *await self._ask(look, "which servers are on its node")]
        for member in members:
            told = [node["told"].get(numbers[member.server.url], []) for node in nodes]
            processes = (await member.server.facts(self._timeout)).processes
            here = [i for i, ranks in enumerate(told) if len(ranks) == processes]
            if not here:
                raise PushFailed(
                    f"rollout.weights.transport=shared: {sum(map(len, told))} of the {processes} rank(s) of "
                    f"{member.server.url} see {file} of a node of the trainer's; a server must be on one of "
                    "them, as this user, with the same /dev/shm. For others use broadcast or disk",
                    [member],
                )
            gpu = nodes[here[0]]["gpu"]
            mapped = bool(gpu) and sees(told[here[0]], processes, gpu)
            self._homes[member.server.url] = Home(here[0], processes if mapped else 0)

    async def _ask(self, orders: Sequence[dict[str, Any]], doing: str) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._relays.ask, orders, doing) if orders else []
