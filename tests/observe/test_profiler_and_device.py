"""The profiler's window, and the device monitor with and without a GPU."""

from __future__ import annotations

import gzip
import json
import re
import types

import pytest

from megatron_gvpo.observe import gpus as device
from megatron_gvpo.observe import profile_window
from megatron_gvpo.observe.monitor import DeviceMonitor, by_machine


def test_profiler_records_its_window_and_nothing_else(tmp_path):
    import torch

    operations = [torch.sin, torch.cos, torch.exp, torch.tanh]
    with profile_window((1, 2), tmp_path, rank=3) as window:
        for step, operation in enumerate(operations):
            window.step(step)
            operation(torch.ones(4))
    stem = tmp_path / "profile" / "rank3_steps1-2"
    with gzip.open(f"{stem}.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::cos", "aten::exp"} <= names and not {"aten::sin", "aten::tanh"} & names
    assert "aten::cos" in stem.with_suffix(".txt").read_text()


def test_profiler_window_cut_short_by_an_error_still_leaves_its_trace(tmp_path):
    with pytest.raises(KeyError), profile_window((1, 9), tmp_path, rank=0) as window:
        window.step(1)
        raise KeyError
    assert (tmp_path / "profile" / "rank0_steps1-9.json.gz").is_file()


def test_no_profiler_window_leaves_nothing(tmp_path):
    with profile_window(None, tmp_path, rank=0) as window:
        window.step(1)
    assert not list(tmp_path.iterdir())


def stand_in_for_a_driver(monkeypatch, **answers) -> None:
    """Two GPUs with pynvml's own error types; the answers of real ones need a GPU."""
    import pynvml

    def unsupported(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    defaults = {
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda gpu: types.SimpleNamespace(used=gpu * 2**30, total=2**37),
        "nvmlDeviceGetUtilizationRates": unsupported,
        "nvmlDeviceGetPowerUsage": lambda gpu: 350_500,
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 41,
        "nvmlDeviceGetClockInfo": unsupported,
        "nvmlDeviceGetTotalEccErrors": unsupported,
        "nvmlDeviceGetCurrentClocksThrottleReasons": unsupported,
        "nvmlDeviceGetName": lambda gpu: "NVIDIA H200",
        "nvmlDeviceGetCudaComputeCapability": lambda gpu: (9, 0),
        "nvmlDeviceGetNvLinkState": lambda gpu, link: int(link < 18) if link < 20 else unsupported(),
    }
    for name, answer in (defaults | answers).items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(device, "_nvml", lambda: pynvml)


def test_a_sensor_that_a_gpu_lacks_is_left_out(monkeypatch):
    stand_in_for_a_driver(monkeypatch)
    readings, broken = device.read_gpus()
    assert readings == {
        0: {"memory_gib": 0.0, "power_w": 350.5, "temperature_c": 41.0},
        1: {"memory_gib": 1.0, "power_w": 350.5, "temperature_c": 41.0},
    }
    assert broken == {}
    assert device.list_gpus()[1] == device.Gpu(1, "NVIDIA H200", 128.0, (9, 0), 18)


def test_the_monitor_keeps_means_extremes_and_why_clocks_were_held_down(monkeypatch):
    import pynvml

    power, heat = iter([300_000, 500_000] * 2), iter([60, 80] * 2)
    reasons = iter([pynvml.nvmlClocksThrottleReasonSwPowerCap, pynvml.nvmlClocksThrottleReasonGpuIdle] * 6)
    stand_in_for_a_driver(
        monkeypatch,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetPowerUsage=lambda gpu: next(power),
        nvmlDeviceGetTemperature=lambda gpu, sensor: next(heat),
        nvmlDeviceGetClockInfo=lambda gpu, clock: 1980 if clock == pynvml.NVML_CLOCK_SM else 2619,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: next(reasons),
    )
    monitor = DeviceMonitor()
    assert monitor.sample() and monitor.sample()
    taken = monitor.take()
    assert (taken["gpu0/power_w"], taken["gpu0/temperature_c"]) == (400.0, 80.0)
    assert (taken["gpu0/sm_mhz"], taken["gpu0/memory_mhz"]) == (1980.0, 2619.0)
    # Asked three times a sample, one for each kind: power first in the first sample, idle in the second.
    assert (taken["gpu0/slowed_by_power"], taken["gpu0/slowed_by_heat"]) == (0.5, 0.0)
    assert monitor.take() == {}
    assert by_machine([taken, None]).keys() == {f"device/{name}" for name in taken}
    assert "device/node1/gpu0/power_w" in by_machine([taken, None, taken])


def test_a_gpu_that_has_lost_its_name_is_listed_without(monkeypatch):
    import pynvml

    def name(gpu):
        if gpu == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return "NVIDIA H200"

    stand_in_for_a_driver(monkeypatch, nvmlDeviceGetName=name)
    assert [gpu.name for gpu in device.list_gpus()] == ["NVIDIA H200", "unknown"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nvmlDeviceGetHandleByIndex", r"GPU 1 does not answer: .*lost"),
        ("nvmlDeviceGetPowerUsage", r"GPU 1 \(NVIDIA H200\) does not answer: .*lost"),
    ],
)
def test_a_broken_gpu_is_named_once(monkeypatch, caplog, function: str, words: str):
    import pynvml

    def lost(gpu):
        if gpu == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return 300_000 if function == "nvmlDeviceGetPowerUsage" else gpu

    stand_in_for_a_driver(monkeypatch, **{function: lost})
    monitor = DeviceMonitor()
    monitor.sample(), monitor.sample()
    [record] = caplog.records
    assert re.search(words, record.getMessage(), re.IGNORECASE)
    assert "gpu0/power_w" in monitor.take()
    assert device.list_gpus()[0].name == "NVIDIA H200"


def test_memory_errors_are_a_warning(monkeypatch, caplog):
    stand_in_for_a_driver(monkeypatch, nvmlDeviceGetTotalEccErrors=lambda gpu, *_: 3 * gpu)
    monitor = DeviceMonitor()
    monitor.sample()
    assert "GPU 1 (NVIDIA H200) has had 3 uncorrected memory errors" in caplog.text


def test_without_a_gpu_the_monitor_is_silent(monkeypatch, caplog):
    monkeypatch.setattr(device, "_nvml", lambda: None)
    with DeviceMonitor(interval=0.01) as monitor:
        assert monitor.take() == {}
    assert not caplog.records
