"""Weights through this machine's shared memory, for servers on the trainer's own machine.

It takes no process group, so it serves where trainer and server share a GPU, which NCCL refuses. Every server
maps the same bytes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_gvpo.rollout.fleet import Member
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.transport import PushFailed, each

SHARED_MEMORY = Path("/dev/shm")


class Shared:
    """One file in memory, as large as the largest bucket, readable by this user alone."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._members: list[Member] = []
        self._version = -1
        self._directory: Path | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    async def begin(self, members: Sequence[Member], version: int) -> None:
        self._members, self._version = list(members), version
        await each(self._members, lambda m: m.server.begin_update(self._timeout))

    async def send(self, bucket: Bucket) -> int:
        file = await asyncio.to_thread(self._write, bucket.flat)
        await each(self._members, lambda m: m.server.receive_shared(bucket.specs, file, self._timeout))
        return bucket.flat.nbytes

    async def end(self) -> None:
        await each(self._members, lambda m: m.server.end_update(str(self._version), self._timeout))

    async def close(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory, self._buffer = None, self._buffer.new_empty(0)

    def _write(self, flat: Tensor) -> Path:
        """Put the bytes where the servers see them."""
        if self._directory is None:
            root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            self._directory = Path(tempfile.mkdtemp(prefix="megatron_gvpo-", dir=root))
        file = self._directory / "bucket"
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
