"""The process group of a weight push, as a server's rank joins it, for the plugins in both engines.

megatron_gvpo.weights.group is the trainer's end.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist


def join(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    backend: str,
    timeout: float,
    max_ctas: int | None,
    memory: str,
) -> tuple[Any, Any]:
    """Returns the group's store, and the group.

    The group is None where weights come through mailboxes in `memory`, the run's directory of shared memory:
    then only the trainer's ranks form a group. `backend`: "gloo" or "nccl"; `timeout`: seconds; `max_ctas`:
    blocks of an operation of NCCL's, None for its own choice.
    """
    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, world_size, False, limit)
    if memory:
        return store, None
    if backend != "nccl":
        return store, dist.ProcessGroupGloo(store, rank, world_size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return store, dist.ProcessGroupNCCL(store, rank, world_size, options)


def next_broadcast(group: Any, size: int, device: torch.device) -> torch.Tensor:
    """The trainer's next broadcast, uint8 [size]. Raises torch's RuntimeError if another rank has died."""
    wire = torch.empty(size, dtype=torch.uint8, device=device)
    group.broadcast([wire], dist.BroadcastOptions()).wait()
    return wire
