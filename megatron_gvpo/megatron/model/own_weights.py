"""The weights that this rank itself holds, and their positions in the Hugging Face tensors.

Megatron-Bridge converts between the two. So that no code here repeats its rules, tensors of positions in
place of weights are converted once: the result shows where each of this rank's elements goes. The conversion
gathers the tensors of one pipeline stage over tensor parallelism, and nothing else. Only one of the tensors
of a kind, over layers and experts, is converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ROWS = 512  # rows of a tensor that are compared at once: few, because a CPU's caches are small


@dataclass(frozen=True)
class OwnPart:
    """Rows `top` to `bottom`, columns `left` to `right` (without the last) of a Hugging Face tensor.

    Tensors are tables here: a vector has one column, and further dimensions are columns. The rows begin in
    this rank's tensor number `source` at element `offset`, and every `stride` elements after it. `added` is
    added to Megatron's elements to get Hugging Face's: 1 for a norm that only Megatron centres at zero.
    """

    name: str
    top: int
    bottom: int
    left: int
    right: int
    source: int
    offset: int
    stride: int
    added: float = 0.0


@dataclass(frozen=True)
class OwnWeights:
    """This rank's tensors, and the parts of the Hugging Face tensors that are in them."""

    tensors: list[Tensor]
    parts: list[OwnPart]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (number, tensor): no collective, unlike the stream of all weights."""
        for number, tensor in enumerate(self.tensors):
            yield str(number), tensor.detach()

    def read(self, part: OwnPart) -> Tensor:
        """Return a part's present weights, [rows, columns]: a view, unless something is added to them."""
        size = (part.bottom - part.top, part.right - part.left)
        tensor = self.tensors[part.source].detach()  # Megatron stores many tensors in one buffer
        view = tensor.as_strided(size, (part.stride, 1), tensor.storage_offset() + part.offset)
        return view + part.added if part.added else view


def find_own_weights(bridge: Any, chunks: list[Any], vocab_size: int) -> OwnWeights:
    """Find this rank's part of the weights. A collective over all ranks.

    `vocab_size`: rows of the embedding and the head, without Megatron's padding. Raises ValueError for a
    tensor whose elements do not lie in rows.
    """
    own = OwnWeights([], [])
    # parts of the first tensor of each kind, with keys of `_names` for names
    known: dict[Any, list[OwnPart]] = {}
    # The groups over which a conversion would bring tensors from other stages and other experts' ranks.
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True, backend="gloo")
    for task in bridge.get_conversion_tasks(chunks):
        if task is None or task.param_weight is None:
            continue
        task.mapping.set_process_groups_from_pg_collection(SimpleNamespace(pp=alone, ep=alone))
        names, kind, number = _names(task.mapping), _kind(task), len(own.tensors)
        if kind in known:
            own.parts.extend(replace(part, name=names[part.name], source=number) for part in known[kind])
        else:
            of_names = _converted_parts(task, vocab_size, number)
            parts = [part for of_name in of_names.values() for part in of_name]
            own.parts.extend(parts)
            key_of = {name: key for key, name in names.items()}
            if of_names.keys() <= key_of.keys():
                known[kind] = [replace(part, name=key_of[part.name]) for part in parts]
        own.tensors.append(task.param_weight)
    return own


def _names(mapping: Any) -> dict[str, str]:
    """Return the names of the Hugging Face tensors that a conversion makes, by its own keys for them."""
    return dict(mapping.hf_param) if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}


def _kind(task: Any) -> tuple[Any, ...]:
    """Return a key that tensors of layers and experts share if their elements go to the same positions."""
    weight, mapping = task.param_weight, task.mapping
    patterns = tuple((key, re.sub(r"\d+", "*", name)) for key, name in _names(mapping).items())
    return type(mapping), type(task.megatron_module), tuple(weight.shape), weight.is_contiguous(), patterns


def _converted_parts(task: Any, vocab_size: int, number: int) -> dict[str, list[OwnPart]]:
    """Convert the positions of the elements of tensor `number`: the parts by name. A collective."""
    weight, mapping = task.param_weight, task.mapping
    if not weight.is_contiguous():
        raise ValueError(f"{task.global_param_name}: not contiguous, so its parts cannot be sent")
    size = weight.numel()
    first = mapping.tp_rank * size
    dtype = torch.int32 if mapping.tp_size * size < 2**31 else torch.int64
    positions = torch.arange(first, first + size, dtype=dtype, device=weight.device).view(weight.shape)
    width = 1 if weight.dim() < 2 else weight.shape[-1]
    added = _added(mapping, weight, task)
    of_names = {}
    for name, converted in mapping.megatron_to_hf(positions, task.megatron_module).items():
        converted = converted - int(added)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            converted = converted[:vocab_size]
        table = converted.reshape(len(converted), -1) if converted.dim() else converted.reshape(1, 1)
        parts = _parts(name, table, first, size, width, number)
        of_names[name] = [replace(part, added=added) for part in parts]
    return of_names


def _added(mapping: Any, weight: Tensor, task: Any) -> float:
    """Return the number that the conversion adds to a vector: 1 for the norms of Qwen3.5's delta nets.

    A collective over tensor parallelism, as each conversion is. Raises ValueError if the numbers differ.
    """
    if weight.dim() > 1:
        return 0.0
    of_zeros = mapping.megatron_to_hf(torch.zeros_like(weight, dtype=torch.float32), task.megatron_module)
    numbers = (
        torch.cat([values.flatten() for values in of_zeros.values()] or [torch.zeros(1)]).unique().tolist()
    )
    if len(numbers) > 1 or numbers[0] != int(numbers[0]):
        raise ValueError(
            f"{task.global_param_name}: its conversion adds {numbers}, so its parts cannot be sent"
        )
    return float(numbers[0])


def _parts(name: str, positions: Tensor, first: int, size: int, width: int, source: int) -> Iterator[OwnPart]:
    """Yield the parts of a tensor whose `positions` [rows, columns] are `first` to `first + size`."""
    left, right, begin = (
        torch.cat(rows).tolist() for rows in zip(*_rows(name, positions, first, size), strict=True)
    )
    top = 0
    for row in range(1, len(left) + 1):
        goes_on = (
            row < len(left)
            and (left[row], right[row]) == (left[row - 1], right[row - 1])
            and begin[row] == begin[row - 1] + width
        )
        if not goes_on:
            if right[top] > left[top]:
                yield OwnPart(name, top, row, left[top], right[top], source, begin[top], width)
            top = row


def _rows(name: str, positions: Tensor, first: int, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for some rows at a time: first own column, the column after the last one, local position."""
    width = positions.shape[1]
    column = torch.arange(width, device=positions.device, dtype=positions.dtype)
    for rows in positions.split(_ROWS):
        begin = rows[:, 0].long() - first
        is_whole, is_foreign = (begin >= 0) & (begin + width <= size), (begin + width <= 0) | (begin >= size)
        # Most tensors are cut between rows: then one comparison is enough.
        if (is_whole | is_foreign).all() and torch.equal(rows - rows[:, :1], column.expand_as(rows)):
            yield begin.new_zeros(len(begin)), is_whole.long() * width, torch.where(is_whole, begin, -1)
            continue
        local = rows.long() - first
        is_own = (local >= 0) & (local < size)
        count = is_own.sum(1)
        first_own = is_own.int().argmax(1)
        begin = local.gather(1, first_own[:, None]).squeeze(1)
        expected = begin[:, None] + column - first_own[:, None]
        inside = (column >= first_own[:, None]) & (column < (first_own + count)[:, None])
        if not torch.equal(inside, is_own) or not torch.equal(local[is_own], expected[is_own]):
            raise ValueError(f"{name}: this rank's elements do not lie in rows, so they cannot be sent")
        begin = torch.where(count > 0, begin, -1)  # -1 for rows that only other ranks have
        yield first_own, first_own + count, begin
