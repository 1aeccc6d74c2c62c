"""Memory and files of the trainer that a server's ranks may map and read, for the plugins in both engines.

A client with a server's key orders weights by a path. The server was started with two directories, in
environment variables, and refuses every path outside them, symbolic links included:
MEGATRON_GVPO_MEMORY, where trainers have directories of shared memory, and MEGATRON_GVPO_WEIGHTS, the
directory of the run's weight files.
"""

from __future__ import annotations

import base64
import json
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_OF_A_RUN = re.compile(r"megatron_gvpo-[0-9a-f]{16}")  # megatron_gvpo.weights.node.new_name
_FILE = re.compile(r"bucket(\.\d+)?|node|\d+\.told")


def in_memory(file: str) -> Path:
    """A file in a run's directory of shared memory, which need not exist on this node.

    Raises PermissionError for any other path, and for a directory that others could have made or can write.
    """
    root, path = Path(os.environ.get("MEGATRON_GVPO_MEMORY", "/dev/shm")), Path(file)
    directory = path.parent
    if directory.parent != root or not _OF_A_RUN.fullmatch(directory.name) or not _FILE.fullmatch(path.name):
        raise PermissionError(f"{file}: this server takes weights from runs' directories in {root} alone")
    for part, kind, mode in ((directory, stat.S_ISDIR, 0o077), (path, stat.S_ISREG, 0o022)):
        try:
            status = part.lstat()
        except FileNotFoundError:
            break
        if not kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & mode:
            raise PermissionError(f"{part}: not this user's own, or a link, or others can write it")
    return path


def in_weights(directory: str) -> list[Path]:
    """The safetensors files of a directory of the run's weights. Raises PermissionError for any other."""
    root = os.environ.get("MEGATRON_GVPO_WEIGHTS")
    if not root:
        raise PermissionError(
            f"{directory}: this server was started without MEGATRON_GVPO_WEIGHTS, the directory that it may "
            "read weights from"
        )
    files = sorted(Path(directory).glob("*.safetensors"))
    for path in (Path(directory), *files):
        if not path.resolve().is_relative_to(Path(root).resolve()):
            raise PermissionError(
                f"{path}: this server reads weights in {root} alone, as its own configuration has it "
                "(output_dir, rollout.weights.directory)"
            )
    return files


# --- buckets: the bytes of tensors, one after another -------------------------------------------------------


class BucketLayout:
    """Names, dtypes and shapes of a bucket's tensors, in order."""

    def __init__(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        self._names = names
        self._dtypes = [getattr(torch, dtype) for dtype in dtypes]
        self._shapes = [torch.Size(shape) for shape in shapes]
        pairs = zip(self._shapes, self._dtypes, strict=True)
        self._sizes = [shape.numel() * dtype.itemsize for shape, dtype in pairs]

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    def views(self, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs; the tensors are views into `flat`, uint8 [nbytes]."""
        parts = zip(self._names, self._dtypes, self._shapes, flat.split(self._sizes), strict=True)
        return [(name, part.view(dtype).view(shape)) for name, dtype, shape, part in parts]

    def mapped(self, file: str) -> torch.Tensor:
        """The bucket's bytes in a file in shared memory, uint8 [nbytes], mapped without a copy.

        Raises PermissionError for a file elsewhere, ValueError for one with fewer bytes.
        """
        return mapped(file, self.nbytes)


def mapped(file: str, size: int) -> torch.Tensor:
    """The first `size` bytes of a file in shared memory, uint8, mapped without a copy.

    Raises PermissionError for a file elsewhere, ValueError for one with fewer bytes.
    """
    path = in_memory(file)
    if path.stat().st_size < size:  # torch would make the file longer
        raise ValueError(f"{file}: {path.stat().st_size:,} bytes, and the bucket has {size:,}")
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


# --- a GPU's memory that the trainer shares with this server's ranks ----------------------------------------

BYTES = ("allocation", "counter", "event")  # fields of a handle in base64
NUMBERS = ("bytes", "offset", "counter_offset", "event_sync")


def tell_gpus(file: str) -> None:
    """Write the UUIDs of the GPUs that this rank sees, as JSON, to `file`.PID.

    The folder is in the shared memory of the trainer's nodes. If it does not exist, this rank is on another
    node, and writes nothing. Raises PermissionError for any other folder.
    """
    if not in_memory(file).parent.is_dir():
        return
    aside, path = Path(f"{file}.{os.getpid()}.tmp"), Path(f"{file}.{os.getpid()}")
    aside.write_text(json.dumps(gpus()))
    aside.rename(path)


def gpus() -> list[str]:
    """The UUIDs of the visible GPUs, in the order of their device numbers."""
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def arguments(handle: dict[str, Any]) -> list[Any]:
    """The arguments of torch.UntypedStorage._new_shared_cuda, after the device number."""
    values = {name: base64.b64decode(handle[name]) for name in BYTES} | {n: handle[n] for n in NUMBERS}
    order = ("allocation", "bytes", "offset", "counter", "counter_offset", "event", "event_sync")
    return [values[name] for name in order]


def opened(handle: dict[str, Any], size: int) -> torch.Tensor:
    """The first `size` bytes of the trainer's bucket, uint8, mapped without a copy on the GPU that has them.

    The trainer may overwrite them once every tensor on this memory is freed and the GPU has finished its
    work.
    """
    if handle["uuid"] not in gpus():
        raise RuntimeError(f"this rank does not see the GPU {handle['uuid']} that the weights are on")
    device = gpus().index(handle["uuid"])
    storage = torch.UntypedStorage._new_shared_cuda(device, *arguments(handle))
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)[:size]
