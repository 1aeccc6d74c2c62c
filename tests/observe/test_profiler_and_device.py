"""The profiler's window, and the device monitor with and without a GPU."""

from __future__ import annotations

import gzip
import http.server
import json
import re
import threading
import types
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.suite.package_log import own_records

from megatron_gvpo.core import gpus as device
from megatron_gvpo.observe import PhaseTimer, profile_window
from megatron_gvpo.observe.monitor import DeviceMonitor, by_machine
from megatron_gvpo.observe.timer import phase_markers
from megatron_gvpo.settings.sections import LoggingConfig

NINE_STEPS = LoggingConfig(profile_steps=(1, 9))


def test_profiler_records_its_window_and_nothing_else(tmp_path):
    import torch

    operations = [torch.sin, torch.cos, torch.exp, torch.tanh]
    with profile_window(LoggingConfig(profile_steps=(1, 2)), tmp_path, rank=3) as window:
        for step, operation in enumerate(operations):
            window.step(step)
            operation(torch.ones(4))
    stem = tmp_path / "profile" / "rank3_steps1-2"
    with gzip.open(f"{stem}.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::cos", "aten::exp"} <= names and not {"aten::sin", "aten::tanh"} & names
    assert "aten::cos" in stem.with_suffix(".txt").read_text()


def test_profiler_window_cut_short_by_an_error_still_leaves_its_trace(tmp_path):
    with pytest.raises(KeyError), profile_window(NINE_STEPS, tmp_path, rank=0) as window:
        window.step(1)
        raise KeyError
    assert (tmp_path / "profile" / "rank0_steps1-9.json.gz").is_file()


def test_no_profiler_window_leaves_nothing(tmp_path):
    with profile_window(LoggingConfig(), tmp_path, rank=0) as window:
        window.step(1)
    assert not list(tmp_path.iterdir())


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans as a collector does, and parses them with OpenTelemetry's own schema."""

    received: ClassVar[list] = []

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_phases_are_spans_of_opentelemetry(monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        markers = phase_markers(LoggingConfig(opentelemetry=True), "runs/x", rank=3)
        timer = PhaseTimer(markers=markers)
        with timer.phase("rollout"):
            pass
        with pytest.raises(KeyError), timer.phase("training"):
            raise KeyError
        for marker in markers:
            marker.close()
        server.shutdown()
    [(path, request)] = Collector.received
    assert path == "/v1/traces"
    [of_run] = request.resource_spans
    assert {"rank", "output_dir", "service.name"} <= {pair.key for pair in of_run.resource.attributes}
    spans = [span for scope in of_run.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["rollout", "training"]
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in spans)
    assert spans[1].events[0].name == "exception"


def test_nsys_gets_a_range_for_each_phase_and_the_window(monkeypatch):
    """torch's own calls, recorded: without a driver the ranges go nowhere, and the profiler cannot start."""
    import torch

    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    logging = LoggingConfig(profiler="nsys", profile_steps=(2, 3))
    timer = PhaseTimer(markers=phase_markers(logging, "runs/x", rank=0))
    with profile_window(logging, Path("unused"), rank=0) as window:
        for step in range(1, 6):
            window.step(step)
            with timer.phase(f"step {step}"):
                pass
    ranges = [[f"step {step}", "end"] for step in range(1, 6)]
    expected = [*ranges[0], "start", *ranges[1], *ranges[2], "stop", *ranges[3], *ranges[4]]
    assert calls == expected


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
    assert device.list_gpus()[1] == device.LocalGpu(1, "NVIDIA H200", 128.0, (9, 0), 18)


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
    [record] = own_records(caplog)
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
    assert not own_records(caplog)
