"""The GPUs of this machine and their sensors, through NVIDIA's management library (nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

GIB = 2**30


@dataclass(frozen=True, slots=True)
class LocalGpu:
    """A GPU of this machine, with the driver's index (CUDA_VISIBLE_DEVICES hides none)."""

    index: int
    name: str
    memory_gib: float
    compute_capability: tuple[int, int] | None
    nvlinks: int  # active links only


def read_gpus() -> tuple[dict[int, dict[str, float]], dict[int, str]]:
    """Read every GPU's sensors. Returns ({index: {sensor: value}}, {index: problem of a broken GPU}).

    `utilization` is a share of time. `ecc_errors` counts uncorrected errors since the driver was loaded.
    `slowed_by_power`, `slowed_by_heat` and `slowed_by_hardware` are 1 while the driver lowers the clocks for
    that reason, else 0.
    """
    nvml = _nvml()
    readings: dict[int, dict[str, float]] = {}
    broken: dict[int, str] = {}
    if nvml is None:
        return readings, broken
    sensors = _sensors(nvml)
    for index, gpu, problem in _gpus(nvml):
        if gpu is None:
            broken[index] = f"GPU {index} does not answer: {problem}"
            continue
        values: dict[str, float] = {}
        for name, read in sensors.items():
            try:
                values[name] = float(read(gpu))
            except nvml.NVMLError as error:
                if error.value in _broken_errors(nvml):
                    broken[index] = f"GPU {index} ({_name(nvml, gpu)}) does not answer: {error}"
        readings[index] = values
        if values.get("ecc_errors"):
            errors = f"{values['ecc_errors']:.0f} uncorrected memory errors"
            broken[index] = f"GPU {index} ({_name(nvml, gpu)}) has had {errors}"
    return readings, broken


def _sensors(nvml: Any) -> dict[str, Callable[[Any], float]]:
    def slowed(*reasons: str) -> Callable[[Any], float]:
        mask = sum(getattr(nvml, f"nvmlClocksThrottleReason{reason}") for reason in reasons)
        return lambda gpu: float(bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & mask))

    return {
        "memory_gib": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
        "utilization": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "sm_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        "ecc_errors": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "slowed_by_power": slowed("SwPowerCap", "HwPowerBrakeSlowdown"),
        "slowed_by_heat": slowed("SwThermalSlowdown", "HwThermalSlowdown"),
        "slowed_by_hardware": slowed("HwSlowdown"),
    }


def list_gpus() -> list[LocalGpu]:
    """Return the GPUs of this machine; an empty list without a driver or nvidia-ml-py."""
    nvml = _nvml()
    if nvml is None:
        return []
    return [_describe(nvml, index, gpu) for index, gpu, _ in _gpus(nvml) if gpu is not None]


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None without one."""
    nvml = _nvml()
    return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


def driver_cuda() -> int | None:
    """Return the major release of CUDA that the driver knows, or None without one."""
    nvml = _nvml()
    return None if nvml is None else int(nvml.nvmlSystemGetCudaDriverVersion_v2()) // 1000


@cache
def _nvml() -> Any | None:
    """Return the initialised pynvml module, or None without the package or a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpus(nvml: Any) -> Iterator[tuple[int, Any | None, str]]:
    """Yield (index, handle, "") of every GPU, and (index, None, problem) of one that the driver has lost."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu, problem = nvml.nvmlDeviceGetHandleByIndex(index), ""
        except nvml.NVMLError as error:
            gpu, problem = None, str(error)
        yield index, gpu, problem


def _broken_errors(nvml: Any) -> tuple[int, ...]:
    """Return the error codes that only a broken GPU gives; a GPU that lacks a sensor gives NOT_SUPPORTED."""
    return nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_IRQ_ISSUE


def _name(nvml: Any, gpu: Any) -> str:
    return str(_try(nvml, nvml.nvmlDeviceGetName, gpu) or "unknown")


def _describe(nvml: Any, index: int, gpu: Any) -> LocalGpu:
    memory = _try(nvml, nvml.nvmlDeviceGetMemoryInfo, gpu)
    links = (_try(nvml, nvml.nvmlDeviceGetNvLinkState, gpu, n) for n in range(nvml.NVML_NVLINK_MAX_LINKS))
    return LocalGpu(
        index=index,
        name=_name(nvml, gpu),
        memory_gib=memory.total / GIB if memory else 0.0,
        compute_capability=_try(nvml, nvml.nvmlDeviceGetCudaComputeCapability, gpu),
        nvlinks=sum(1 for active in links if active),
    )


def _try(nvml: Any, read: Callable[..., Any], *arguments: Any) -> Any | None:
    """Return one reading, or None if this GPU does not support it (MIG slices, some cloud machines)."""
    try:
        return read(*arguments)
    except nvml.NVMLError:
        return None
