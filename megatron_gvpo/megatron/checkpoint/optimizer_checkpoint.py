"""Stores the distributed optimizer's state as shards of whole, named tensors, which any layout can load.

A data-parallel rank updates one contiguous run of every parameter's flattened elements. A run is cut into
boxes of the parameter. Each box is stored as a view of the optimizer's own memory: saving gathers and copies
nothing, and loading writes into the optimizer's memory.

megatron-core's own formats depend on the layout, or gather. Its `fully_reshardable` (0.19.2) also shifts the
elements after a padded bucket, because it slices a buffer without padding at offsets with padding. A tied
embedding has a bucket of its own on the last stage of a pipeline, and overlapped gradients have many buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

# (first index of every axis, size of every axis)
Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Yield, in order, the boxes that make up elements `begin` to `end` of a flattened tensor of `shape`.

    Each box is contiguous in the flattened tensor.
    """
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # all within one row
        cuts = [(last, begin - last * row, end - last * row)]
    else:
        cuts = [(first - 1, begin - (first - 1) * row, row)] if begin < first * row else []
        if first < last:
            cuts.append((first, 0, (last - first) * row))
        if last * row < end:
            cuts.append((last, 0, end - last * row))
    for index, low, high in cuts:
        if low == 0 and high % row == 0:
            yield (index, *(0 for _ in shape[1:])), (high // row, *shape[1:])
        else:
            for offset, size in boxes(shape[1:], low, high):
                yield (index, *offset), (1, *size)


def optimizer_shards(megatron: Any, weights: dict[str, Any]) -> dict[str, ShardedTensor]:
    """Return this rank's shards of masters and moments, for dist_checkpointing to save or to load in place.

    `megatron`: Megatron's (chained) optimizer; `weights`: the model's own sharded state.
    """
    # Megatron's ShardedObject, a value that is not a tensor, has no `data` that is a parameter.
    of_parameter = {id(base.data): base for base in nested_values(weights) if hasattr(base, "data")}
    shards: dict[str, ShardedTensor] = {}
    for optimizer in megatron.chained_optimizers:
        for parameter, begin, end in _runs(optimizer):
            for whole, start in _parts(of_parameter[id(parameter)], parameter):
                low, high = max(begin, start), min(end, start + whole.data.numel())
                for name, run in _states(optimizer, parameter):
                    at = low - begin
                    for box in boxes(tuple(whole.data.shape), low - start, high - start):
                        size = math.prod(box[1])
                        shards[f"{len(shards)}"] = _shard(name, whole, box, run[at : at + size])
                        at += size
    return shards


def _runs(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Yield (parameter, first element, last element + 1) of every run that this rank updates."""
    for of_dtypes in getattr(optimizer, "gbuf_ranges", ()):  # Megatron omits it on a rank without parameters
        for buckets in of_dtypes.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _states(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, flat tensor) of the master and the moments of this rank's run of a parameter."""
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    if "master_param" in tensors:  # in host memory; "param" is only the fp32 weight that it is copied to
        tensors["param"] = tensors.pop("master_param")
    for name, tensor in tensors.items():
        if name != "step":
            yield name, tensor.detach().view(-1)


def _parts(
    base: ShardedTensor | ShardedTensorFactory, parameter: Tensor
) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield (stored tensor, its first element in the parameter); a fused gate-and-up parameter has two."""
    if isinstance(base, ShardedTensor):
        yield base, 0
        return
    shape = torch.empty(parameter.shape, device="meta")  # only shows where the factory cuts
    for part in nested_values(replace(base, data=shape).build()):
        assert part.data.is_contiguous(), f"{part.key}: not a contiguous run of its parameter's elements"
        yield part, part.data.storage_offset()


def _shard(name: str, whole: ShardedTensor, box: Box, flat: Tensor) -> ShardedTensor:
    """Return the shard for a box of one of the optimizer's tensors; `whole` is the model's stored tensor."""
    (offset, size), ahead = box, whole.prepend_axis_num
    # Megatron stacks the layers of a weight in one tensor. Here each layer has a name of its own.
    layer = "".join(f"[{i}]" for i in whole.global_offset[:ahead])
    return ShardedTensor(
        key=f"optimizer.{name}.{whole.key}{layer}",
        data=flat.view(size),
        dtype=flat.dtype,
        local_shape=size,
        global_shape=tuple(whole.global_shape[ahead:]),
        global_offset=tuple(a + b for a, b in zip(whole.global_offset[ahead:], offset, strict=True)),
        axis_fragmentations=None,  # boxes have no regular grid
        # The last number counts data-parallel copies of the weight; there is one copy of this run.
        replica_id=(*whole.replica_id[:-1], 0),
        allow_shape_mismatch=whole.allow_shape_mismatch,
    )
