"""Memory that rollout servers of the same node can map: a rank's GPU, and a file of the node's first rank.

A GPU's memory is mapped by CUDA IPC. PyTorch would pickle its handles; here they are JSON, so that nothing
that came over the network is unpickled. Trainer and server need the same PID and IPC namespaces: those of one
machine, or of one container.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.core.store import shared_memory
from megatron_gvpo.weights.transport import PushFailed

_PREFIX = "megatron_gvpo-"


def new_name() -> str:
    """A name, unique to a run, for its directories in its nodes' shared memory."""
    return _PREFIX + secrets.token_hex(8)


_NAMES = _PREFIX + "[0-9a-f]" * 16  # a pattern of all such names


class NodeMemory:
    """The memory that one rank offers to servers; its buckets are on `device`.

    The first rank of a node has a directory called `name` (a `new_name()`, the same on all nodes) in the
    node's shared memory, which only this user can read, and in it one file as large as the largest bucket.
    The constructor removes the directories of runs that were killed.
    """

    def __init__(self, name: str, device: torch.device, first: bool = True) -> None:
        root = shared_memory()
        self.directory = root / name
        self._first = first
        self._lock: int | None = None
        if first:
            for other in root.glob(_NAMES):
                _remove_if_abandoned(other)
            self._lock = _make_locked(self.directory)
        self._device, self.on_gpu = device, device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def first_rank(self, rank: int) -> int:
        """The trainer rank that was the first of its node to call this method; `rank` is the caller.

        The number is in a file, by which servers recognise the node.
        """
        file, aside = self.directory / "node", self.directory / f"node.{rank}"
        aside.write_text(str(rank))
        with contextlib.suppress(FileExistsError):
            os.link(aside, file)
        aside.unlink()
        return int(file.read_text())

    def seen(self) -> dict[str, Any]:
        """The servers whose ranks see this node's files, and this rank's GPU.

        "gpu" is the UUID of the GPU that has the buckets, "" for buckets on the host. On a node's first rank,
        "told" has, by the number of a server, the GPUs that each of its ranks sees.
        """
        gpus_seen: dict[str, list[list[str]]] = {}
        for file in self.directory.glob("*.told.*") if self._first else ():
            if not file.name.endswith(".tmp"):
                gpus_seen.setdefault(file.name.split(".")[0], []).append(json.loads(file.read_text()))
                file.unlink()
        return {"told": gpus_seen, "gpu": gpu_uuid(self._device) if self.on_gpu else ""}

    def offer(self, flat: Tensor, handles: int, file: bool) -> dict[str, Any]:
        """Offer a bucket to servers.

        Returns "handles", as many as requested, each for one mapping of the GPU's memory, and "file", the
        path of a copy if one is requested, else "". Raises PushFailed if there is no memory for the file.
        """
        mappings = [shared_storage(flat) for _ in range(handles)]
        return {"handles": mappings, "file": str(self._write(flat)) if file else ""}

    def close(self) -> None:
        if self._first and self._lock is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
        self._buffer = self._buffer.new_empty(0)

    def _write(self, flat: Tensor) -> Path:
        file = self.directory / "bucket"
        if len(self._buffer) < len(flat):
            self._buffer = reserved(file, len(flat))
        self._buffer[: len(flat)].copy_(flat)
        return file


def reserved(file: Path, size: int) -> Tensor:
    """The file in shared memory, made as large as `size` bytes: uint8 [size]. Raises PushFailed."""
    try:
        # Reserves memory, without which a write would kill the process.
        with file.open("ab") as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    except OSError as error:
        raise PushFailed(
            f"{file}: {size:,} bytes of shared memory are not free ({error.strerror}): lower "
            "rollout.weights.bucket_mb, or give this machine or container more",
            [],
        ) from None
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)


def _make_locked(directory: Path) -> int:
    """Make the directory and lock it while this process lives. Returns the descriptor that holds the lock."""
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another run removed it before it was locked
            lock = os.open(directory, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(lock), directory.stat()):
                return lock
            os.close(lock)


def _remove_if_abandoned(directory: Path) -> None:
    """Remove the directory, unless a living process has locked it or it belongs to another user."""
    with contextlib.suppress(OSError):
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)


# The values that torch.UntypedStorage._share_cuda_ returns, and _new_shared_cuda takes, after the device
# number.
FIELDS = ("allocation", "bytes", "offset", "counter", "counter_offset", "event", "event_sync")


def shared_storage(flat: Tensor) -> dict[str, Any]:
    """A handle, in JSON values, with which `megatron_gvpo_memory.opened` maps the storage of `flat`.

    A process can map each handle only once. The storage must not change until the other process has released
    it. If that process never maps it, its memory stays allocated until this process ends. Raises ValueError
    for a tensor on the host.
    """
    if not flat.is_cuda:
        raise ValueError(
            f"CUDA IPC shares memory of a GPU, and this bucket is on the {flat.device.type}: "
            "processes without a GPU share host memory instead"
        )
    torch.cuda.synchronize(flat.device)  # wait until its bytes are written
    _, *values = flat.untyped_storage()._share_cuda_()
    return plain(gpu_uuid(flat.device), values)


def plain(uuid: str, values: Sequence[bytes | int | bool]) -> dict[str, Any]:
    """The values of FIELDS on the GPU with this UUID as JSON values, bytes in base64."""
    named = zip(FIELDS, values, strict=True)
    texts = {name: base64.b64encode(v).decode() if isinstance(v, bytes) else v for name, v in named}
    return {"uuid": uuid, **texts}


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def seen_by_all(seen_by_ranks: Sequence[Sequence[str]]) -> list[str]:
    """The UUIDs of the GPUs that all ranks of a server see, in the order of the first rank's devices."""
    first, *others = seen_by_ranks
    return [uuid for uuid in first if all(uuid in seen for seen in others)]
