"""What the machine's GPUs and this process use, through NVIDIA's management library (nvidia-ml-py)."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, as the driver numbers them (CUDA_VISIBLE_DEVICES hides none)."""

    index: int
    name: str
    memory_gib: float
    compute_capability: tuple[int, int] | None
    nvlinks: int  # active ones


def device_snapshot() -> dict[str, float]:
    """Metrics of this moment: `device/rss_gib`, the memory of this process, and for every GPU
    `device/gpu<i>/{memory_gib,utilization,power_w,temperature_c}`, utilization from 0 to 1.

    Without a GPU, its driver or nvidia-ml-py only the first; a sensor that a GPU lacks is left out.
    """
    snapshot = {"device/rss_gib": _rss_bytes() / GIB}
    nvml = _nvml()
    if nvml is None:
        return snapshot
    sensors: dict[str, Callable[[Any], float]] = {
        "memory_gib": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
        "utilization": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    }
    for index, gpu in enumerate(_handles(nvml)):
        for name, read in sensors.items():
            value = _try(nvml, read, gpu)
            if value is not None:
                snapshot[f"device/gpu{index}/{name}"] = float(value)
    return snapshot


def list_gpus() -> list[Gpu]:
    """The GPUs of this machine; none without a driver or nvidia-ml-py."""
    nvml = _nvml()
    if nvml is None:
        return []
    return [_describe(nvml, index, gpu) for index, gpu in enumerate(_handles(nvml))]


def driver_version() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    nvml = _nvml()
    return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


@cache
def _nvml() -> Any | None:
    """The initialised pynvml module, or None where there is nothing to ask."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _describe(nvml: Any, index: int, gpu: Any) -> Gpu:
    memory = _try(nvml, nvml.nvmlDeviceGetMemoryInfo, gpu)
    links = (_try(nvml, nvml.nvmlDeviceGetNvLinkState, gpu, n) for n in range(nvml.NVML_NVLINK_MAX_LINKS))
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(gpu),
        memory_gib=memory.total / GIB if memory else 0.0,
        compute_capability=_try(nvml, nvml.nvmlDeviceGetCudaComputeCapability, gpu),
        nvlinks=sum(1 for active in links if active),
    )


def _try(nvml: Any, read: Callable[..., Any], *arguments: Any) -> Any | None:
    """One reading, or None where this GPU does not support it (MIG slices, some cloud machines)."""
    try:
        return read(*arguments)
    except nvml.NVMLError:
        return None


def _rss_bytes() -> int:
    """Resident memory of this process; its peak where the system has no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
