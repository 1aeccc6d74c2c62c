"""A process group of the trainer's first rank and the servers' ranks, beside all others.

It is made from a TCPStore and a backend's process group alone: the default group, torch's table of groups and
torchrun's own store are not touched (a server that dies must not take the trainer's groups with it).
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.rollout.server import Meeting

_numbers = itertools.count()


class WeightGroup:
    """Rank 0 of the group. `port` 0 of the store: the system chooses one."""

    def __init__(self, address: str, world_size: int, backend: str, timeout: float) -> None:
        self._timeout = datetime.timedelta(seconds=timeout)
        self._tcp = dist.TCPStore(
            address, 0, world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        name = f"weights-{os.getpid()}-{next(_numbers)}"
        self.meeting = Meeting(address, self._tcp.port, world_size, name, backend)
        self._group: Any = None  # torch's stubs do not make backends process groups

    def connect(self, prefixes: Sequence[str]) -> None:
        """Blocks until all ranks are there. Raises RuntimeError (torch's) after the timeout.

        `prefixes`: what the other ranks put before their keys in the store, outermost first.
        """
        store: dist.Store = self._tcp
        for prefix in prefixes:
            store = dist.PrefixStore(prefix, store)
        world = self.meeting.world_size
        if self.meeting.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(store, 0, world, options)
        else:
            self._group = dist.ProcessGroupGloo(store, 0, world, self._timeout)

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """From this rank to all others; returns at once. The work raises when a rank has gone."""
        assert self._group is not None, "connect first"
        work: dist.Work = self._group.broadcast([tensor], dist.BroadcastOptions())
        return work

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()
