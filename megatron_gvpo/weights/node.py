"""Memory that rollout servers of the same node can map: a rank's GPU, and a file of the node's first rank."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.weights.transport import PushFailed

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "megatron_gvpo-"


def new_name() -> str:
    """A name for a run's directories in its nodes' shared memory, which no other run has."""
    return _PREFIX + secrets.token_hex(8)


_NAMES = _PREFIX + "[0-9a-f]" * 16  # as a pattern


class NodeMemory:
    """What one rank can offer. `device`: where its buckets are.

    The first rank of a node has a directory in the node's shared memory, this user's alone, and in it one
    file as large as the largest bucket. `name`: of the directory, a `new_name()`, the same on all nodes. What
    runs that were killed have left there it removes.
    """

    def __init__(self, name: str, device: torch.device, first: bool = True) -> None:
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        self.directory = root / name
        self._first = first
        self._lock: int | None = None
        if first:
            for other in root.glob(_NAMES):
                _remove_if_left(other)
            self._lock = _made(self.directory)
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
        if self._first and self._lock is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
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


def _made(directory: Path) -> int:
    """Make it, and lock it for as long as this process lives. Returns the descriptor that holds the lock."""
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed as left over, before the lock was there
            lock = os.open(directory, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(lock), directory.stat()):
                return lock
            os.close(lock)


def _remove_if_left(directory: Path) -> None:
    """Remove it, unless a process lives that has locked it, or it is another user's."""
    with contextlib.suppress(OSError):
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)


# What torch.UntypedStorage._share_cuda_ returns after the device's number, and _new_shared_cuda takes.
FIELDS = ("allocation", "bytes", "offset", "counter", "counter_offset", "event", "event_sync")


def shared_storage(flat: Tensor) -> dict[str, Any]:
    """What `megatron_gvpo_ipc.opened` needs to map the storage that `flat` begins: JSON values.

    Good for one mapping. The storage must stay as it is until the other process has let go of it; where that
    never mapped it, its memory is held until this process ends. Raises ValueError for a tensor on the host.
    """
    if not flat.is_cuda:
        raise ValueError(
            f"CUDA IPC shares memory of a GPU, and this bucket is on the {flat.device.type}: "
            "processes without a GPU share host memory instead"
        )
    torch.cuda.synchronize(flat.device)  # its bytes are there
    _, *values = flat.untyped_storage()._share_cuda_()
    return plain(gpu_uuid(flat.device), values)


def plain(uuid: str, values: Sequence[bytes | int | bool]) -> dict[str, Any]:
    """The values of FIELDS on the GPU of this UUID, as JSON has them: bytes in base64."""
    named = zip(FIELDS, values, strict=True)
    texts = {name: base64.b64encode(v).decode() if isinstance(v, bytes) else v for name, v in named}
    return {"uuid": uuid, **texts}


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def seen_by_all(seen_by_ranks: Sequence[Sequence[str]]) -> list[str]:
    """The GPUs, by UUID and in the order of their numbers, that all ranks of a server see."""
    first, *others = seen_by_ranks
    return [uuid for uuid in first if all(uuid in seen for seen in others)]
