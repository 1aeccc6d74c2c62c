"""One network thread for all of a process's gloo groups.

megatron-core makes some two dozen groups a process. Each would bring a gloo device of its own, whose thread
wakes a hundred times a second: together 3% of a core for nothing, beside the threads that compute.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo

_devices: list[Any] = []  # of this process's first group, which chose them by the environment
os.register_at_fork(after_in_child=_devices.clear)  # their threads are not in the child


class OneDeviceGroup(ProcessGroupGloo):
    """A gloo group on the devices of the process's first one."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if not _devices:
            super().__init__(store, rank, size, timeout)
            own: Any = self.options
            _devices.extend(own._devices)
            return
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._devices = timeout, _devices
        super().__init__(store, rank, size, options)
