"""A bucket in this GPU's memory, for another process that sees the same GPU: CUDA IPC, as plain data.

PyTorch pickles such handles; here they are JSON, so that nothing that came over the network is unpickled.
Trainer and server need the same PID and IPC namespaces: processes of one machine, or of one container.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
