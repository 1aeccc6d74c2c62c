"""Gloo process groups that leave the cores to the threads that compute.

megatron-core creates some two dozen groups a process. Each would have a gloo device of its own, whose thread
wakes a hundred times a second: together 3% of a core for nothing. Here all groups share one device.

A group's worker thread copies gathered data with PyTorch, which would start an OpenMP team for it. If a
process has more OpenMP threads than cores, libgomp puts every idle thread to sleep at once, the computing
ones included, thousands of times a step. So the worker threads copy without a team.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, ProcessGroupGloo

_PARALLEL = 2**15  # elements from which on PyTorch shares an operation between threads

_devices: list[Any] = []  # the devices of a first group, which gloo chose by the environment
os.register_at_fork(after_in_child=_devices.clear)  # a forked child does not have their threads


class OneDeviceGroup(ProcessGroupGloo):
    """A gloo group with one worker thread, on the devices that all groups of the process share."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        gloo: Any = ProcessGroupGloo
        if not _devices:
            _devices.extend(gloo(HashStore(), 0, 1, timeout).options._devices)
        options = gloo._Options()
        options._timeout, options._devices, options._threads = timeout, _devices, 1
        super().__init__(store, rank, size, options)
        self._limit_worker_threads()

    def _limit_worker_threads(self) -> None:
        """Run one operation large enough for a team, with PyTorch limited to one thread.

        The worker thread takes over PyTorch's number of threads at its first such operation, and keeps it.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            mine = torch.zeros(_PARALLEL)
            group: Any = self
            group.allgather([[torch.empty_like(mine) for _ in range(self.size())]], [mine]).wait()
        finally:
            torch.set_num_threads(threads)
