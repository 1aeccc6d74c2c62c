"""Weights through memory that trainer and servers share, for servers on the trainer's own machine.

It takes no process group, so it serves where trainer and server share a GPU, which NCCL refuses. A server
that sees the GPU of the trainer's first rank maps the bucket there (CUDA IPC); the others map the same bytes
in the machine's shared memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_gvpo.rollout.fleet import Member
from megatron_gvpo.rollout.server import SharedPlace
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.ipc import gpu_uuid, sees, shared_storage
from megatron_gvpo.weights.transport import PushFailed, each

SHARED_MEMORY = Path("/dev/shm")


class Shared:
    """One file in memory, as large as the largest bucket, readable by this user alone; and the GPU's memory.

    `device`: where the buckets are.
    """

    def __init__(self, timeout: float, device: torch.device) -> None:
        self._timeout, self._device = timeout, device
        self._members: list[Member] = []
        self._handles: dict[str, int] = {}  # how many each server takes of the GPU's memory, by url
        self._refused: set[str] = set()  # who could not map it after all, by url
        self._version = -1
        self._directory: Path | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def metrics(self) -> dict[str, float]:
        """The share of the servers that mapped the GPU's memory."""
        share = {"sync/ipc": len(self._handles) / len(self._members)} if self._members else {}
        return share if self._device.type == "cuda" else {}

    async def begin(self, members: Sequence[Member], version: int) -> None:
        self._members, self._version = list(members), version
        await each(self._members, lambda m: m.server.begin_update(self._timeout))
        self._handles = await self._that_see(gpu_uuid(self._device)) if self._device.type == "cuda" else {}

    async def send(self, bucket: Bucket) -> int:
        file = Path()
        if len(self._handles) < len(self._members):
            file = await asyncio.to_thread(self._write, bucket.flat)

        async def post(member: Member) -> None:
            ranks = self._handles.get(member.server.url, 0)
            place: SharedPlace = [shared_storage(bucket.flat) for _ in range(ranks)] if ranks else file
            await member.server.receive_shared(bucket.specs, place, self._timeout)

        try:
            await each(self._members, post)
        except PushFailed as failure:  # the next attempt goes by host memory
            self._refused |= self._handles.keys() & {m.server.url for m in failure.members}
            raise
        return bucket.flat.nbytes

    async def end(self) -> None:
        await each(self._members, lambda m: m.server.end_update(str(self._version), self._timeout))
        if self._handles:
            torch.cuda.ipc_collect()

    async def close(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory, self._buffer = None, self._buffer.new_empty(0)

    async def _that_see(self, uuid: str) -> dict[str, int]:
        """The servers all of whose ranks see the GPU, by url, and how many ranks that are."""
        found: dict[str, int] = {}

        async def ask(member: Member) -> None:
            processes = (await member.server.facts(self._timeout)).processes
            with tempfile.TemporaryDirectory(dir=self._place()) as directory:
                await member.server.tell_gpus(Path(directory) / "gpus", self._timeout)
                seen = [json.loads(file.read_text()) for file in Path(directory).glob("gpus.*")]
            if sees(seen, processes, uuid) and member.server.url not in self._refused:
                found[member.server.url] = processes

        await each(self._members, ask)
        return found

    def _place(self) -> Path:
        """Where the servers see files of ours."""
        if self._directory is None:
            root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            self._directory = Path(tempfile.mkdtemp(prefix="megatron_gvpo-", dir=root))
        return self._directory

    def _write(self, flat: Tensor) -> Path:
        """Put the bytes where the servers see them."""
        file = self._place() / "bucket"
        if len(self._buffer) < len(flat):
            try:
                with file.open("ab") as stream:  # reserved: writing where no memory is would end the process
                    os.posix_fallocate(stream.fileno(), 0, len(flat))
            except OSError as error:
                raise PushFailed(
                    f"{file}: no {len(flat):,} bytes of shared memory ({error.strerror}): lower "
                    "rollout.weights.bucket_mb, or give this machine or container more",
                    [],
                ) from None
            self._buffer = torch.from_file(str(file), shared=True, size=len(flat), dtype=torch.uint8)
        self._buffer[: len(flat)].copy_(flat)
        return file
