"""Counts the communication between ranks: every operation of torch.distributed, by group, exactly.

    with TrafficCounter() as traffic:
        policy.update(rows, at_step_start=True)
    traffic.volumes  # {("all_reduce", "tp"): Volume(calls=..., bytes=...), ...}

It counts at the operators below torch.distributed's Python functions. So it also sees functions that were
imported by name, and coalesced and asynchronous operations. It slows down every operation in the block:
count in one step and measure time in another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operator -> (name, index of the argument that holds the whole message: a gather's output, a scatter's input)
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "recv_any_source_": ("receive", 0),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
}
_SILENT = {"check_for_nan"}  # operations that send nothing


@dataclass
class Volume:
    """Calls, and bytes of whole messages: the reduced, gathered or scattered tensor counts once, whatever the
    algorithm below sends.
    """

    calls: int = 0
    bytes: int = 0


class TrafficCounter(TorchDispatchMode):
    """Context that counts this rank's messages in groups of more than one rank.

    `names` maps torch's group names to readable ones (`group_names`); other groups are
    named after their ranks. Raises RuntimeError for an operator that a newer torch has added.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.volumes: defaultdict[tuple[str, str], Volume] = defaultdict(Volume)
        self._names = names or {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d" and func._opname not in _SILENT:
            self._note(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _note(self, operator: str, args: tuple[Any, ...]) -> None:
        if operator not in _OPERATORS:
            raise RuntimeError(
                f"torch.ops.c10d.{operator} is not in {__name__}._OPERATORS: add it, and say which argument "
                "holds its message"
            )
        operation, message = _OPERATORS[operator]
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg))
        group: Any = dist.ProcessGroup.unbox(boxed)
        if group.size() == 1:
            return
        ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
        volume = self.volumes[operation, self._names.get(group.group_name, ranks)]
        volume.calls += 1
        if message is not None:
            tensors = [leaf for leaf in tree_leaves(args[message]) if isinstance(leaf, Tensor)]
            volume.bytes += sum(tensor.nbytes for tensor in tensors)


def _is_group(boxed: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(boxed._type())


def group_names() -> dict[str, str]:
    """Return {torch's name of a process group: its use}; the group "norm" sums the gradient's norm."""
    world = dist.group.WORLD
    groups: dict[str, Any] = {
        "world": world,
        "embedding": parallel_state.get_embedding_group(check_initialized=False),
        "norm": parallel_state.get_intra_distributed_optimizer_instance_group(check_initialized=False),
        "cp": parallel_state.get_context_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "tp": parallel_state.get_tensor_model_parallel_group(),
    }
    return {group.group_name: name for name, group in groups.items() if isinstance(group, dist.ProcessGroup)}
