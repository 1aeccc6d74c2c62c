"""Maps GPU memory that the trainer shares with this server's ranks, for the plugins in both engines."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import torch
from megatron_gvpo_allowed_paths import in_memory

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

    The trainer may overwrite them once every tensor on this memory is gone and the GPU has finished its work.
    """
    if handle["uuid"] not in gpus():
        raise RuntimeError(f"this rank does not see the GPU {handle['uuid']} that the weights are on")
    device = gpus().index(handle["uuid"])
    storage = torch.UntypedStorage._new_shared_cuda(device, *arguments(handle))
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)[:size]
