"""A world of any size in one process: every group is torch's "fake" one, whose collectives return at once.

The results of collectives are this rank's own numbers. The collectives of device tensors are counted by
group.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

NODE = 8  # GPUs of a node

# Collectives of torch.distributed, by name.
_COUNTED = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv"),
)


@dataclass
class Traffic:
    """Calls of one collective over one group, and the bytes of their largest tensors (the gathered ones)."""

    calls: int = 0
    bytes: int = 0


class FakeWorld:
    """Replaces functions of torch.distributed, before megatron-core is imported, which keeps them."""

    def __init__(self) -> None:
        self.traffic: dict[tuple[str, str], Traffic] = {}  # by (group's name, collective)
        self._backends: dict[int, str | None] = {}  # requested backend, by id of the group
        self._names: dict[int, str] = {}
        self._answer_as_fake()
        for name in _COUNTED:
            self._replace(name, self._counted(name, getattr(dist, name)))

    def join(self, rank: int, size: int) -> None:
        """Make this process `rank` of a world of `size` ranks from now on."""
        local = min(size, NODE)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank % local))
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, function)

    def _answer_as_fake(self) -> None:
        """Make every new group a fake one, which still names the requested backend."""
        new_group, get_backend = dist.new_group, dist.get_backend

        @functools.wraps(new_group)
        def fake_group(
            ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any
        ) -> Any:
            known = {name: value for name, value in options.items() if name in ("group_desc", "device_id")}
            group = new_group(ranks, backend="fake", **known)
            self._backends[id(group)] = backend
            self._names[id(group)] = _readable(options.get("group_desc"))
            return group

        @functools.wraps(get_backend)
        def backend_of(group: Any = None) -> str:
            if id(group) in self._backends:
                return self._backends[id(group)] or "nccl"
            return str(get_backend(group))

        def keep_own_objects(*_: Any, **__: Any) -> None:
            """Leave this rank's objects as they are: no other rank exists that could send its own."""

        self._replace("broadcast_object_list", keep_own_objects)
        self._replace("new_group", fake_group)
        self._replace("get_backend", backend_of)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            tensors = [t for part in (*args, *options.values()) for t in _tensors(part)]
            if any(t.is_cuda for t in tensors):
                group = options.get("group") or next(
                    (a for a in args if isinstance(a, dist.ProcessGroup)), None
                )
                key = ("world" if group is None else self._names.get(id(group), "other"), name)
                one = self.traffic.setdefault(key, Traffic())
                one.calls += 1
                one.bytes += max(_nbytes(part) for part in (*args, *options.values()))
            return function(*args, **options)

        return counted


def _tensors(argument: Any) -> list[torch.Tensor]:
    items = argument if isinstance(argument, list | tuple) else [argument]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _nbytes(argument: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(argument))


def _readable(description: str | None) -> str:
    """Megatron's description of a group, such as TENSOR_MODEL_PARALLEL_GROUP, in lower case without GROUP."""
    return (description or "other").lower().removesuffix("_group").replace("_", " ")
