"""Weights through memory that trainer and servers share, for servers on the trainer's own nodes.

It takes no process group, so it serves where trainer and server share a GPU, which NCCL refuses. A rank of a
server maps the bucket of a trainer's rank whose GPU it sees (CUDA IPC); a server not all of whose ranks see
one maps the same bytes in the node's shared memory. All but rank 0's own are offered by relays.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_gvpo.rollout.pool import Member
from megatron_gvpo.rollout.server import SharedPlace
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.ipc import seen_by_all
from megatron_gvpo.weights.node import NodeMemory
from megatron_gvpo.weights.relay import Relays
from megatron_gvpo.weights.transport import PushFailed, each


class Home(NamedTuple):
    """What a server maps, by number: 0 is rank 0, the others are the relays in their order."""

    file: int  # who has the file of its node
    gpus: tuple[int, ...]  # whose GPU each of its ranks maps; empty: they map the file


class Shared:
    """`memory` is what rank 0 offers itself."""

    def __init__(self, timeout: float, memory: NodeMemory, relays: Relays) -> None:
        self._timeout, self._memory, self._relays = timeout, memory, relays
        self._members: list[Member] = []
        self._homes: dict[str, Home] = {}  # by url
        self._numbers = itertools.count()
        self._version = -1

    @property
    def metrics(self) -> dict[str, float]:
        """The share of the servers that mapped a GPU's memory."""
        homes = [self._homes[m.server.url] for m in self._members if m.server.url in self._homes]
        mapped = [len(home.gpus) > 0 for home in homes]
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
        for home in (self._homes[m.server.url] for m in self._members):
            wanted[home.file]["file"] |= not home.gpus
            for number in home.gpus:
                wanted[number]["handles"] += 1
        mine = wanted[0]
        # The relays hear of the bucket whatever rank 0 can offer: until they do they are not in the stream's
        # next collective, in which rank 0 may be waiting for them.
        own, theirs = await asyncio.gather(
            asyncio.to_thread(self._memory.offer, bucket.flat, mine["handles"], mine["file"]),
            asyncio.to_thread(self._relays.ask, wanted[1:], "to offer a bucket"),
            return_exceptions=True,
        )
        for found in (own, theirs):
            if isinstance(found, BaseException):
                raise found
        offers: list[dict[str, Any]] = [own, *theirs]

        async def post(member: Member) -> None:
            home = self._homes[member.server.url]
            place: SharedPlace = [offers[number]["handles"].pop() for number in home.gpus]
            await member.server.receive_shared(
                bucket.specs, place or Path(offers[home.file]["file"]), self._timeout
            )

        try:
            await each(self._members, post)
        except PushFailed as failure:  # the next attempt goes by host memory
            for url in (m.server.url for m in failure.members):
                self._homes[url] = self._homes[url]._replace(gpus=())
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
        """Which node each server is on, and whose GPUs it sees: it says so in files in that node's memory."""
        numbers = {member.server.url: str(next(self._numbers)) for member in members}
        directory = self._memory.directory

        async def ask(member: Member) -> None:
            await member.server.tell_gpus(directory / f"{numbers[member.server.url]}.told", self._timeout)

        await each(members, ask)
        look = [{"do": "look"}] * len(self._relays)
        found = [self._memory.seen(), *await asyncio.to_thread(self._relays.ask, look, "to look for servers")]
        by_gpu = {seen["gpu"]: number for number, seen in enumerate(found) if seen["gpu"]}
        for member in members:
            told = [seen["told"].get(numbers[member.server.url], []) for seen in found]
            processes = (await member.server.facts(self._timeout)).processes
            file = next((number for number, ranks in enumerate(told) if len(ranks) == processes), None)
            if file is None:
                raise PushFailed(
                    f"rollout.weights.transport=shared: {sum(map(len, told))} of the {processes} rank(s) of "
                    f"{member.server.url} see {directory} of a node of the trainer's; a server must be on "
                    "one of them, as this user, with the same /dev/shm. For others use broadcast or disk",
                    [member],
                )
            ours = [by_gpu[uuid] for uuid in seen_by_all(told[file]) if uuid in by_gpu]
            gpus = [ours[rank % len(ours)] for rank in range(processes)] if ours else []
            self._homes[member.server.url] = Home(file, tuple(gpus))
