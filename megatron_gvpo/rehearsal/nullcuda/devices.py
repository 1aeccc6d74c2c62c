"""The GPUs that the null CUDA can stand for, and the environment of a process that runs on one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A GPU as PyTorch reports it. Sources: NVIDIA's datasheets and `torch.cuda.get_device_properties`."""

    name: str
    capability: int  # 90 is sm_90
    multiprocessors: int
    shared_bytes: int  # largest shared memory of a block, after opting in


DEVICES = {
    "h100": Device("NVIDIA H100 80GB HBM3", 90, 132, 232_448),
    "h200": Device("NVIDIA H200", 90, 132, 232_448),
    "h800": Device("NVIDIA H800", 90, 132, 232_448),
    "a100": Device("NVIDIA A100-SXM4-80GB", 80, 108, 166_912),
    "b200": Device("NVIDIA B200", 100, 148, 232_448),
}


def environment(library: Path, device: Device, count: int, usable_bytes: int) -> dict[str, str]:
    """Variables for a process that runs on `count` such devices, each with `usable_bytes` for its tensors."""
    return {
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "NULLCUDA_NAME": device.name,
        "NULLCUDA_DEVICES": str(count),
        "NULLCUDA_BYTES": str(usable_bytes),
        "NULLCUDA_CAPABILITY": str(device.capability),
        "NULLCUDA_SMS": str(device.multiprocessors),
        "NULLCUDA_SHARED_BYTES": str(device.shared_bytes),
    }
