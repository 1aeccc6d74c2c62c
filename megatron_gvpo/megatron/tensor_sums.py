"""Two sums over each trained tensor, of its gradient or its weights, that are equal in every layout.

A rank sums over the shard that its distributed optimizer updates, so that every element is read once on one
rank, and nothing is gathered. Sums do not depend on the order in which a layout stores the elements, so a
record of a run on many GPUs can be compared with the same step on one CPU. The first sum is linear in the
gradient, so the contribution of a response or a rank to it can be identified.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megatron_gvpo.core.collectives import all_gather_msgpack
from megatron_gvpo.megatron.model.model import Model

# Elements that are converted to fp64 at once. On a CPU they stay in a core's cache, which takes a tenth of
# the time of 2**24 elements, which go through memory; on a GPU a larger chunk needs fewer kernels.
_CHUNK = {"cpu": 2**16, "cuda": 2**24}
_LAYER = re.compile(r"(.*\.layers\.)(\d+)((?:\..*)?)$")
_EXPERT = re.compile(r"(.*\.local_experts\.|.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)(.*)$")


class TensorSum(NamedTuple):
    """Over all elements of a tensor: their sum, the root of the sum of their squares, and their number."""

    total: float
    norm: float
    elements: int


class _OwnShard(NamedTuple):
    """This rank's shard of a tensor: `begin` to `end` of its flattened elements, also as gradients."""

    name: str
    parameter: Tensor
    begin: int
    end: int
    gradient: Tensor


class TensorSums:
    """The sums over the trained tensors of a model, by Megatron's names with numbers of the whole model."""

    def __init__(self, model: Model) -> None:
        """A collective over all ranks."""
        self._parts = list(_parts(model))
        own = sorted({part.name for part in self._parts})
        self.names: list[str] = sorted({name for names in all_gather_msgpack(own) for name in names})
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._device = next(iter(model.weights())).device

    @torch.no_grad()
    def take(self, what: Literal["gradients", "weights"]) -> dict[str, TensorSum]:
        """The sums by tensor, in fp64. A collective. Gradients must be accumulated and reduced."""
        sums = torch.zeros(len(self.names), 3, dtype=torch.float64, device=self._device)
        for part in self._parts:
            values = part.gradient
            if what == "weights":
                values = part.parameter.detach().view(-1)[part.begin : part.end]
            row = sums[self._numbers[part.name]]
            for chunk in values.split(_CHUNK[self._device.type]):
                exact = chunk.double()
                row[0] += exact.sum()
                row[1] += torch.dot(exact, exact)
            row[2] += len(values)
        dist.all_reduce(sums)
        return {
            name: TensorSum(total, math.sqrt(squares), int(elements))
            for name, (total, squares, elements) in zip(self.names, sums.tolist(), strict=True)
        }


def _parts(model: Model) -> Iterator[_OwnShard]:
    """This rank's shards, without copies of other ranks' tensors: tied embeddings, replicated norms."""
    experts = parallel_state.get_expert_tensor_parallel_group()
    names: dict[Tensor, str] = {}
    for chunk in model.chunks:
        names |= zip(chunk.parameters(), global_names(chunk), strict=True)
    for buffer in model.buffers():
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // group.size()
            first, last = size * group.rank(), size * (group.rank() + 1)
            for parameter, (begin, end) in bucket.param_to_index.items():
                own = max(begin, first), min(end, last)
                is_counted = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
                    parameter, expert_tp_group=experts
                )
                if own[0] < own[1] and is_counted:
                    gradient = bucket.grad_data[own[0] : own[1]]
                    yield _OwnShard(names[parameter], parameter, own[0] - begin, own[1] - begin, gradient)


def global_names(chunk: torch.nn.Module) -> list[str]:
    """The names of a chunk's parameters, in its order; layers and experts have their numbers in the model."""
    layers = {name: module for name, module in chunk.named_modules() if hasattr(module, "layer_number")}
    experts = {
        f"{name}.": module.num_local_experts * parallel_state.get_expert_model_parallel_rank()
        for name, module in chunk.named_modules()
        if hasattr(module, "num_local_experts")
    }
    names = []
    for name, _ in chunk.named_parameters():
        for prefix, offset in experts.items():
            if offset and name.startswith(prefix) and (match := _EXPERT.match(name)):
                name = f"{match[1]}{int(match[2]) + offset}{match[3]}"
                break
        if (match := _LAYER.match(name)) and (module := layers.get(f"{match[1]}{match[2]}")) is not None:
            name = f"{match[1]}{module.layer_number - 1}{match[3]}"
        while name.startswith("module."):
            name = name.removeprefix("module.")
        names.append(name)
    return names
