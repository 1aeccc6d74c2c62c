"""The sharded state of every trained model in a checkpoint, in a form that any layout loads.

The distributed optimizer's state is stored as shards of whole, named tensors. A data-parallel rank updates
one contiguous run of every parameter's flattened elements. A run is cut into boxes of the parameter. Each box
is stored as a view of the optimizer's own memory: saving gathers and copies nothing, and loading writes into
the optimizer's memory.

megatron-core's own formats depend on the layout, or gather tensors. Its `fully_reshardable` (0.19.2) also
shifts the elements after a padded bucket, because it slices a buffer without padding at offsets with padding.
A tied embedding has a bucket of its own on the last stage of a pipeline, and overlapped gradients have many
buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_gvpo.megatron.adapters.tensors import is_adapter
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.optimizer import Optimizer
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.megatron.reference_weights import ReferenceWeights

CRITIC = "critic"  # the critic's directory in a checkpoint

# A part of a tensor: (first index of every axis, size of every axis)
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class TrainedModel:
    """One trained model of a checkpoint: the policy, or the critic, which has a directory inside."""

    directory: Path
    model: Model
    optimizer: Optimizer
    reference: ReferenceWeights | None = None


def trained_models(policy: Policy, directory: Path) -> list[TrainedModel]:
    """Return the policy and its critic, if it has one, each with its directory in the checkpoint."""
    models = [TrainedModel(directory, policy.model, policy.optimizer, policy.reference)]
    if (critic := policy.critic) is not None:
        models.append(TrainedModel(directory / CRITIC, critic.model, critic.optimizer))
    return models


def sharded_state(trained: TrainedModel, randomness: bool) -> dict[str, Any]:
    """Return views of weights, optimizer and schedule for dist_checkpointing, to save or to load into.

    `randomness`: with the states of this rank's random generators.
    """
    weights = weights_state(trained.model)
    state = {
        **weights,
        "optimizer": {"tensors": optimizer_shards(trained.optimizer.megatron, weights)},
        "schedule": trained.optimizer.scheduler.state_dict(),
    }
    if randomness:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["random"] = ShardedObject("random", _random_state(), (world,), (rank,))
    return state


def own_tensors(policy: Policy) -> list[Tensor]:
    """Return the tensors that this rank writes into a checkpoint."""
    leaves: list[Any] = []
    for trained in trained_models(policy, Path()):
        leaves += tree_leaves(sharded_state(trained, randomness=True))
    return [leaf.data for leaf in leaves if isinstance(leaf, ShardedTensor) and leaf.data is not None]


def weights_state(model: Model) -> dict[str, Any]:
    """Return the model's weights, or its adapters alone, for dist_checkpointing, to save or to load."""
    states = {name: chunk.sharded_state_dict() for name, chunk in bare_chunks(model).items()}
    if model.adapters is None:
        return states
    return {
        name: {key: value for key, value in state.items() if is_adapter(key)}
        for name, state in states.items()
    }


def load_weights(model: Model, loaded: dict[str, Any]) -> None:
    """Load into the model the state that dist_checkpointing loaded for `weights_state`."""
    for name, chunk in bare_chunks(model).items():
        # The wrappers of adapters write the base's weights under other names than they look for. The names of
        # the adapters have been compared with the checkpoint's.
        names = chunk.load_state_dict(loaded[name], strict=model.adapters is None)
        wrong = [key for key in names.missing_keys if is_adapter(key)] + names.unexpected_keys
        if wrong:
            raise RuntimeError(f"adapters that cannot be loaded: {wrong[0]} and {len(wrong) - 1} more")


def bare_chunks(model: Model) -> dict[str, Any]:
    """Return the model's chunks by name, without the wrappers for data parallelism and mixed precision."""
    chunks = {}
    for i, chunk in enumerate(model.chunks):
        while hasattr(chunk, "module"):  # Megatron's wrappers hold the wrapped module
            chunk = chunk.module
        chunks["model" if len(model.chunks) == 1 else f"model{i}"] = chunk
    return chunks


def layout_of(policy: Policy) -> dict[str, int]:
    """Return the sizes on which the ranks' random states depend."""
    model = policy.model.config
    return {
        "parallel.tp": model.tensor_model_parallel_size,
        "parallel.pp": model.pipeline_model_parallel_size,
        "parallel.vpp": model.virtual_pipeline_model_parallel_size or 1,
        "parallel.cp": model.context_parallel_size,
        "parallel.ep": model.expert_model_parallel_size,
        "parallel.etp": model.expert_tensor_parallel_size,
        "processes": dist.get_world_size(),
    }


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set this rank's random generators to a state that `sharded_state` has saved."""
    get_cuda_rng_tracker().set_states(state["megatron"])
    torch.cuda.set_rng_state(state["cuda"])
    torch.set_rng_state(state["torch"])


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
    if first > last:  # the range lies within one row
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
    shards = [
        shard
        for optimizer in megatron.chained_optimizers
        for run in _runs(optimizer)
        for part in _parts(of_parameter[id(run.parameter)], run.parameter)
        for name, flat in _states(optimizer, run.parameter)
        for shard in _shards(name, flat, run, part)
    ]
    return {f"{i}": shard for i, shard in enumerate(shards)}


class _Run(NamedTuple):
    """The elements `begin` to `end` of a flattened parameter, which this rank updates."""

    parameter: Tensor
    begin: int
    end: int


class _Part(NamedTuple):
    """A contiguous run of a parameter's elements that are stored in one tensor.

    `first_index`: where in the stored tensor they are, along its first axes. `elements` are on the meta
    device, and their offset is that in the flattened parameter.
    """

    stored: ShardedTensor
    first_index: tuple[int, ...]
    elements: Tensor


def _runs(optimizer: Any) -> Iterator[_Run]:
    """Yield every range that this rank updates."""
    for of_dtypes in getattr(optimizer, "gbuf_ranges", ()):  # Megatron omits it on a rank without parameters
        for buckets in of_dtypes.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield _Run(parameter, ranges["param"].start, ranges["param"].end)


def _states(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, flat tensor) of the master and the moments, for this rank's range of a parameter."""
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    # A "master_param" is in host memory; "param" is then only the fp32 weight that it is copied to.
    if "master_param" in tensors:
        tensors["param"] = tensors.pop("master_param")
    for name, tensor in tensors.items():
        if name != "step":
            yield name, tensor.detach().view(-1)


def _parts(base: ShardedTensor | ShardedTensorFactory, parameter: Tensor) -> Iterator[_Part]:
    """Yield the parts of a parameter, for which the model's sharded state has `base`.

    A parameter that fuses gate and up is stored as two tensors, and as two runs of every expert where it also
    holds all experts.
    """
    shape = torch.empty(parameter.shape, device="meta")
    if isinstance(base, ShardedTensor):
        yield _Part(base, (), shape)
        return
    for stored in nested_values(replace(base, data=shape).build()):
        for index, elements in contiguous_parts(stored.data):
            yield _Part(stored, index, elements)


def contiguous_parts(tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield (index, view) of the largest contiguous parts of a tensor that its first axes count."""
    if tensor.is_contiguous():
        yield (), tensor
        return
    for i, row in enumerate(tensor):
        for index, elements in contiguous_parts(row):
            yield (i, *index), elements


def _shards(name: str, flat: Tensor, run: _Run, part: _Part) -> Iterator[ShardedTensor]:
    """Yield the shards of one of the optimizer's tensors, `flat` for the whole run, that lie in the part."""
    first = int(part.elements.storage_offset())  # in the flattened parameter, as the run's `begin`
    low, high = max(run.begin, first), min(run.end, first + part.elements.numel())
    at = low - run.begin
    for offset, size in boxes(tuple(part.elements.shape), low - first, high - first):
        box = (*part.first_index, *offset), (*(1 for _ in part.first_index), *size)
        end = at + math.prod(size)
        yield _shard(name, part.stored, box, flat[at:end])
        at = end


def _shard(name: str, stored: ShardedTensor, box: Box, flat: Tensor) -> ShardedTensor:
    """Return the shard for a box of one of the optimizer's tensors; `stored` is the model's stored tensor."""
    (offset, size), ahead = box, stored.prepend_axis_num
    # Megatron stacks the layers of a weight in one tensor. Here each layer has a name of its own.
    layer = "".join(f"[{i}]" for i in stored.global_offset[:ahead])
    return ShardedTensor(
        key=f"optimizer.{name}.{stored.key}{layer}",
        data=flat.view(size),
        dtype=flat.dtype,
        local_shape=size,
        global_shape=tuple(stored.global_shape[ahead:]),
        global_offset=tuple(a + b for a, b in zip(stored.global_offset[ahead:], offset, strict=True)),
        axis_fragmentations=None,  # boxes have no regular grid
        # The last number counts data-parallel copies of the weight; there is one copy of this run.
        replica_id=(*stored.replica_id[:-1], 0),
        allow_shape_mismatch=stored.allow_shape_mismatch,
    )
