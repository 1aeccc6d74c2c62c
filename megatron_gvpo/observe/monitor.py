"""Samples the sensors of a machine's GPUs in a thread; returns their means or maxima at every step."""

from __future__ import annotations

import logging
import threading
from typing import Self

from megatron_gvpo.core.gpus import read_gpus

log = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between samples
_HIGHEST = ("memory_gib", "temperature_c", "ecc_errors")  # the maximum of the samples; others: the mean


class DeviceMonitor:
    """Context manager that samples this machine's GPUs. Without GPUs it does nothing.

    One warning names a GPU that fails; the others are still sampled.
    """

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._samples: dict[str, list[float]] = {}
        self._warned: set[int] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device monitor", daemon=True)

    def __enter__(self) -> Self:
        if self.sample():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def take(self) -> dict[str, float]:
        """Return metrics `gpu<i>/<sensor>` since the last take; see `gpus.read_gpus`."""
        with self._lock:
            samples, self._samples = self._samples, {}
        return {
            name: max(values) if name.endswith(_HIGHEST) else sum(values) / len(values)
            for name, values in samples.items()
        }

    def sample(self) -> bool:
        """Take one sample; returns True if the machine has a GPU."""
        readings, broken = read_gpus()
        for index in broken.keys() - self._warned:
            log.warning("%s; see `nvidia-smi`", broken[index])
            self._warned.add(index)
        with self._lock:
            for index, values in readings.items():
                for name, value in values.items():
                    self._samples.setdefault(f"gpu{index}/{name}", []).append(value)
        return bool(readings or broken)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self.sample()


def by_machine(taken: list[dict[str, float] | None]) -> dict[str, float]:
    """Merge the results of all ranks' `take`; only one rank of each machine samples, the others give None.

    The names are `device/gpu<i>/...`, with several machines `device/node<j>/gpu<i>/...`.
    """
    machines = [metrics for metrics in taken if metrics is not None]
    return {
        f"device/node{j}/{name}" if len(machines) > 1 else f"device/{name}": value
        for j, metrics in enumerate(machines)
        for name, value in metrics.items()
    }
