"""The distributed optimizer's state as parts of whole, named tensors: what any layout finds again.

Of every parameter a data-parallel rank updates one run of the flattened elements. A run is cut into boxes
of the parameter, and each box is stored as a view of the optimizer's own memory: nothing is gathered or
copied to save, and loading writes into the optimizer's memory.

megatron-core's own formats are bound to the layout, or gather. And its `fully_reshardable` (0.19.2) shifts
what lies behind a padded bucket, because it slices a buffer without padding at offsets with it: a tied
embedding has a bucket of its own on the last stage of a pipeline, and an overlapped gradient has many.
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
    """The boxes, in order, that elements `begin` to `end` of a flattened tensor of `shape` make up.

    Each is contiguous in the flattened tensor.
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
    """What this rank has of masters and moments, for dist_checkpointing to save, or to load in place.

    `megatron`: the (chained) optimizer; `weights`: the model's own sharded state.
    """
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
    """(parameter, first, last + 1 of its elements) of what this rank updates."""
    for of_dtypes in getattr(optimizer, "gbuf_ranges", ()):  # a rank without parameters has none
        for buckets in of_dtypes.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _states(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The master and the moments of this rank's run of a parameter, flat."""
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    if "master_param" in tensors:  # in host memory, beside the fp32 weight that it is copied to
        tensors["param"] = tensors.pop("master_param")
    for name, tensor in tensors.items():
        if name != "step":
            yield name, tensor.detach().view(-1)


def _parts(
    base: ShardedTensor | ShardedTensorFactory, parameter: Tensor
) -> Iterator[tuple[ShardedTensor, int]]:
    """The stored tensors that a parameter makes up, and where each begins in it: gate and up are two."""
    if isinstance(base, ShardedTensor):
        yield base, 0
        return
    shape = torch.empty(parameter.shape, device="meta")  # to see what is cut where, and nothing else
    for part in nested_values(replace(base, data=shape).build()):
        assert part.data.is_contiguous(), f"{part.key} is no run of its parameter's elements"
        yield part, part.data.storage_offset()


def _shard(name: str, whole: ShardedTensor, box: Box, flat: Tensor) -> ShardedTensor:
    """A box of one of the optimizer's tensors of `whole`, which belongs to the model's."""
    (offset, size), ahead = box, whole.prepend_axis_num
    # Layers are stacked in one tensor, of which the stage knows its places: here, each has a name of its own.
    layer = "".join(f"[{i}]" for i in whole.global_offset[:ahead])
    return ShardedTensor(
        key=f"optimizer.{name}.{whole.key}{layer}",
        data=flat.view(size),
        dtype=flat.dtype,
        local_shape=size,
        global_shape=tuple(whole.global_shape[ahead:]),
        global_offset=tuple(a + b for a, b in zip(whole.global_offset[ahead:], offset, strict=True)),
        axis_fragmentations=None,  # boxes have no regular grid
        # The last place counts data-parallel copies of the weight; of this run there is one.
        replica_id=(*whole.replica_id[:-1], 0),
        allow_shape_mismatch=whole.allow_shape_mismatch,
    )
