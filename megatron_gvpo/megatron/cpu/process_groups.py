"""Gloo groups that leave the cores to the threads that compute.

megatron-core makes some two dozen groups a process. Each would bring a gloo device of its own, whose thread
wakes a hundred times a second: together 3% of a core for nothing. Here they share one.

A group's working thread copies what it gathers by PyTorch, which would start an OpenMP team for it. Of a
process with more OpenMP threads than cores, libgomp puts every thread to sleep as soon as it has nothing to
do, the computing ones included, thousands of times a step. So these threads copy alone.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, ProcessGroupGloo

_PARALLEL = 2**15  # elements from which on PyTorch shares an operation between threads

_devices: list[Any] = []  # of a first group, which chose them by the environment
os.register_at_fork(after_in_child=_devices.clear)  # their threads are not in the child


class OneDeviceGroup(ProcessGroupGloo):
    """A gloo group with one working thread, on the devices that all groups of the process share."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        gloo: Any = ProcessGroupGloo
        if not _devices:
            _devices.extend(gloo(HashStore(), 0, 1, timeout).options._devices)
        options = gloo._Options()
        options._timeout, options._devices, options._threads = timeout, _devices, 1
        super().__init__(store, rank, size, options)
        self._work_alone()

    def _work_alone(self) -> None:
        """Let the working thread meet its first shared operation while there is nobody to share it with.

        A thread takes over PyTorch's number of threads at that moment, and keeps it.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            mine = torch.zeros(_PARALLEL)
            group: Any = self
            group.allgather([[torch.empty_like(mine) for _ in range(self.size())]], [mine]).wait()
        finally:
            torch.set_num_threads(threads)
