"""A server rank's side of a sharded push, for the plugins in both engines.

The rank gets parts of tensors from the trainer's ranks or from other servers' ranks, passes on what the next
one needs, and loads what is its own. What comes from whom, and in which round, it reads in its part of the
plan (megatron_gvpo.weights.shard_plan), which is in the store of the process group.
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron_gvpo_slices import Box, FullTensor, Slice

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]
Message = tuple[int, list[list[int]]]  # the other rank, and cells: tensor, rows from, to, columns from, to
# Loaders may fuse the tensors of one attention, so these are loaded together.
_TOGETHER = re.compile(r".*\.self_attn\.")


class Shards:
    """This rank's part in the pushes over one process group."""

    def __init__(self, group: Any, store: Any, rank: int, device: torch.device) -> None:
        self._group, self._store, self._rank, self._device = group, store, rank, device
        self._tables: list[tuple[str, torch.dtype, torch.Size]] = []
        self._receives: list[list[Message]] = []
        self._sends: list[list[Message]] = []
        self._needed: dict[int, list[Box]] = {}

    def read_layout(self, load: Load) -> None:
        """Run the engine's loader without weights, and tell the trainer what it would copy."""
        for name, dtype, shape in json.loads(zlib.decompress(self._store.get("tables"))):
            self._tables.append((name, getattr(torch, dtype), torch.Size(shape)))
        tensors = [FullTensor(*table[:2], table[2]) for table in self._tables]
        load([(tensor.name, Slice.of(tensor)) for tensor in tensors])
        self._needed = {i: tensor.needed() for i, tensor in enumerate(tensors) if tensor.copied}
        told = json.dumps(sorted(self._needed.items()))
        self._store.set(f"needs.{self._rank}", zlib.compress(told.encode()))

    def receive(self, load: Load) -> None:
        """Take part in one push. Raises RuntimeError if another rank of the group fails."""
        if not self._receives:
            self._connect()
        tensors = {i: self._full(i) for i in self._needed}
        remaining = Counter(cell[0] for messages in self._receives for _, cells in messages for cell in cells)
        units = _units(self._tables, remaining)
        counted: Counter[str] = Counter()
        passing: list[list[tuple[Any, torch.Tensor]]] = []  # by round, with the buffers, which they need
        coming = self._begin(0)
        for number, messages in enumerate(self._receives):
            came, coming = coming, self._begin(number + 1)
            received: dict[tuple[int, ...], torch.Tensor] = {}
            for (source, cells), (work, wire) in zip(messages, came, strict=True):
                work.wait()
                counted[f"{source}-{self._rank}"] += len(wire)
                for cell, part in zip(cells, wire.split([self._size(c) for c in cells]), strict=True):
                    received[tuple(cell)] = part
                    _place(tensors[cell[0]], cell, part)
            passing.append([])
            for target, cells in self._sends[number]:
                wire = torch.cat([received[tuple(cell)] for cell in cells])
                passing[-1].append((self._group.send([wire], target, 0), wire))
                counted[f"{self._rank}-{target}"] += len(wire)
            for tensor in [cell[0] for _, cells in messages for cell in cells]:
                remaining[tensor] -= 1
                unit = units[tensor]
                if remaining[tensor] == 0 and not any(remaining[other] for other in unit):
                    load([(tensors[other].name, _loadable(tensors.pop(other))) for other in unit])
            while len(passing) > 2:
                for work, _ in passing.pop(0):
                    work.wait()
        for work, _ in [sent for round_ in passing for sent in round_]:
            work.wait()
        self._store.set(f"counted.{self._rank}", json.dumps(counted))

    def report(self, error: Exception) -> None:
        """Tell the trainer, where it still runs, that this rank's part in a push failed."""
        with contextlib.suppress(RuntimeError):  # torch's: the store's process has ended
            self._store.set(f"failed.{self._rank}", f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Leave the group. Ranks that wait for this one fail when nothing here uses the group any more."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _connect(self) -> None:
        """Read this rank's part of the plan, and try each link: all ranks try theirs in one order."""
        part = json.loads(zlib.decompress(self._store.get(f"plan.{self._rank}")))
        self._receives, self._sends = part["receives"], part["sends"]
        sources = {(source, self._rank) for messages in self._receives for source, _ in messages}
        targets = {(self._rank, target) for messages in self._sends for target, _ in messages}
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for source, target in sorted(sources | targets):
            if source == self._rank:
                self._group.send([byte], target, 0).wait()
            else:
                self._group.recv([byte], source, 0).wait()

    def _begin(self, number: int) -> list[tuple[Any, torch.Tensor]]:
        """Begin to receive the messages of a round; none after the last."""
        requests = []
        for source, cells in self._receives[number] if number < len(self._receives) else ():
            size = sum(self._size(cell) for cell in cells)
            wire = torch.empty(size, dtype=torch.uint8, device=self._device)
            requests.append((self._group.recv([wire], source, 0), wire))
        return requests

    def _full(self, number: int) -> FullTensor:
        """A tensor with memory for the parts that this rank needs of it."""
        tensor = FullTensor(*self._tables[number])
        tensor.parts = {
            box: torch.empty((box[1] - box[0], box[3] - box[2]), dtype=tensor.dtype, device=self._device)
            for box in map(tuple, self._needed[number])
        }
        return tensor

    def _size(self, cell: Sequence[int]) -> int:
        tensor, top, bottom, left, right = cell
        return (bottom - top) * (right - left) * self._tables[tensor][1].itemsize


def _place(tensor: FullTensor, cell: Sequence[int], part: torch.Tensor) -> None:
    """Write a cell, uint8 [bytes], into every part that has it."""
    _, top, bottom, left, right = cell
    assert tensor.parts is not None
    size = tensor.dtype.itemsize
    for box, values in tensor.parts.items():
        if box[0] <= top and bottom <= box[1] and box[2] <= left and right <= box[3]:
            target = values[top - box[0] : bottom - box[0]].view(torch.uint8)
            target[:, (left - box[2]) * size : (right - box[2]) * size] = part.view(bottom - top, -1)


def _loadable(tensor: FullTensor) -> torch.Tensor:
    """The tensor for the engine's loader: a slice, or the tensor itself if the rank has all of it."""
    assert tensor.parts is not None
    if tensor.everything in tensor.parts:
        return tensor.parts[tensor.everything].view(tensor.shape)
    return Slice.of(tensor)


def _units(
    tables: list[tuple[str, torch.dtype, torch.Size]], remaining: Counter[int]
) -> dict[int, list[int]]:
    """The tensors that are loaded in one call, for each tensor that comes."""
    units: dict[str, list[int]] = {}
    for number in sorted(remaining):
        name = tables[number][0]
        together = _TOGETHER.match(name)
        units.setdefault(together[0] if together else name, []).append(number)
    return {number: unit for unit in units.values() for number in unit}
