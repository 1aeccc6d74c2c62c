"""Memory that rollout servers of the same node can map: a rank's GPU, and a file of the node's first rank."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.weights.ipc import gpu_uuid, shared_storage
from megatron_gvpo.weights.transport import PushFailed

SHARED_MEMORY = Path("/dev/shm")


class NodeMemory:
    """What one rank can offer. `device`: where its buckets are.

    The first rank of a node has a directory in the node's shared memory, this user's alone, and in it one
    file as large as the largest bucket. `name`: of the directory, the same on all nodes.
    """

    def __init__(self, name: str, device: torch.device, first: bool = True) -> None:
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        self.directory = root / name
        self._first = first
        if first:
            self.directory.mkdir(mode=0o700, exist_ok=True)
        self._device, self.on_gpu = device, device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def seen(self) -> dict[str, Any]:
        """What is here: "gpu", the UUID of the buckets' own, empty where they are on the host; and, for a
        node's first rank, "told": the GPUs that each rank of a server sees, by the server's number."""
        told: dict[str, list[list[str]]] = {}
        for file in self.directory.glob("*.told.*") if self._first else ():
            if not file.name.endswith(".tmp"):
                told.setdefault(file.name.split(".")[0], []).append(json.loads(file.read_text()))
                file.unlink()
        return {"told": told, "gpu": gpu_uuid(self._device) if self.on_gpu else ""}

    def offer(self, flat: Tensor, handles: int, file: bool) -> dict[str, Any]:
        """Where servers find the bytes: "handles", so many of the GPU's memory, each good for one mapping,
        and "file". Raises PushFailed where there is no memory for the file."""
        found: dict[str, Any] = {"handles": [shared_storage(flat) for _ in range(handles)]}
        return found | {"file": str(self._write(flat)) if file else ""}

    def close(self) -> None:
        if self._first:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._buffer = self._buffer.new_empty(0)

    def _write(self, flat: Tensor) -> Path:
        file = self.directory / "bucket"
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
