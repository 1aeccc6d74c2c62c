"""The environment of a process on the emulated GPU: that of a rehearsed rank, with copies of every size."""

from __future__ import annotations

from megatron_gvpo.rehearsal.nullcuda.devices import Device
from megatron_gvpo.rehearsal.process import environment_of_ranks

_EVERY_SIZE = 2**62


def environment(device: Device, count: int, usable: int) -> dict[str, str]:
    """Variables of a process with `count` emulated devices, each with `usable` bytes for tensors.

    Raises ConfigError if something is missing on this machine.
    """
    return environment_of_ranks(device, count, usable) | {
        "NULLCUDA_COPY": str(_EVERY_SIZE),
        "NULLCUDA_KERNELS": "refuse",
        "TORCHDYNAMO_DISABLE": "1",  # compiled code launches kernels of its own
        "TRITON_INTERPRET": "1",
    }
