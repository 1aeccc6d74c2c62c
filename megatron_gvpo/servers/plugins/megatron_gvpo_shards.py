"""A server rank's side of a sharded push, for the plugins in both engines.

The rank gets parts of tensors from the trainer's ranks or from other servers' ranks, passes on the parts that
the next rank needs, and loads its own. Its share of the plan (megatron_gvpo.weights.shard_plan) says which
rank sends it which parts in which round; the rank reads it from the store of the process group.

In every round it sends the parts of the round before and receives the next. Meanwhile it loads the complete
tensors in one call, because an engine's loader reads the list of all parameters in each call.

A rank that shares a machine with the trainer may get all its cells from a mailbox in place of a process group
(megatron_gvpo_mailbox). Such a rank passes nothing on.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron_gvpo_mailbox import Inbox, seat
from megatron_gvpo_slices import Box, FullTensor, Slice

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]
Cell = tuple[int, ...]  # a part of a tensor: the tensor's number, rows from, to, columns from, to
Message = tuple[int, list[list[int]]]  # the other rank, and cells
# Loaders may fuse the tensors of one attention, so these are loaded together.
_TOGETHER = re.compile(r".*\.self_attn\.")
STOP = "stop"  # a key of the group's store: the push has failed
STOP_POLL = 0.05  # seconds


class Shards:
    """This rank's part in the pushes over one process group, or through one mailbox."""

    def __init__(
        self,
        group: Any,
        store: Any,
        rank: int,
        device: torch.device,
        memory: str = "",
        timeout: float = 300.0,
    ) -> None:
        """`memory`: the run's directory of shared memory, if weights come through a mailbox there.

        `timeout`: seconds for a round in the mailbox.
        """
        self._group, self._store, self._rank, self._device = group, store, rank, device
        self._memory, self._timeout, self._pushes = memory, timeout, 0
        self._tables: list[tuple[str, torch.dtype, torch.Size]] = []
        self._receives: list[list[Message]] = []
        self._sends: list[list[Message]] = []
        self._needed: dict[int, list[Box]] = {}

    def read_layout(self, load: Load) -> None:
        """Run the engine's loader without weights, and send the trainer the boxes that it would copy."""
        for name, dtype, shape in json.loads(zlib.decompress(self._store.get("tables"))):
            self._tables.append((name, getattr(torch, dtype), torch.Size(shape)))
        tensors = [FullTensor(*table[:2], table[2]) for table in self._tables]
        load([(tensor.name, Slice.of(tensor)) for tensor in tensors])
        self._needed = {i: tensor.needed() for i, tensor in enumerate(tensors) if tensor.copied}
        needs = json.dumps(sorted(self._needed.items()))
        self._store.set(f"needs.{self._rank}", zlib.compress(needs.encode()))
        if self._memory:
            self._store.set(f"seat.{self._rank}", json.dumps(seat(self._memory, self._device)))

    def receive(self, load: Load) -> None:
        """Take part in one push. Raises RuntimeError if another rank of the group fails."""
        if not self._receives:
            self._connect()
        loading = _Loading(self._tables, self._receives, self._full, load)
        if not self._memory:
            counted = self._receive_from_group(loading)
        else:
            try:
                counted = self._receive_from_mailbox(loading)
            except Exception as error:  # tell the trainer's rank, which waits for this one
                self.report(error)
                raise
        self._store.set(f"counted.{self._rank}", json.dumps(counted))

    def _receive_from_group(self, loading: _Loading) -> Counter[str]:
        """Exchange and load cells, round by round; returns the bytes of each link, "from-to"."""
        counted: Counter[str] = Counter()
        came: dict[Cell, torch.Tensor] = {}  # the cells of the round before, each uint8 [bytes]
        for receives, sends in zip(self._receives, self._sends, strict=True):
            outgoing = [(to, torch.cat([came[tuple(cell)] for cell in cells])) for to, cells in sends]
            incoming = [(source, self._wire(cells)) for source, cells in receives]
            works = _exchange(self._group, outgoing, incoming)
            loading.take(came)
            for work in works:
                work.wait()
            counted.update({f"{self._rank}-{target}": len(wire) for target, wire in outgoing})
            counted.update({f"{source}-{self._rank}": len(wire) for source, wire in incoming})
            came = {
                tuple(cell): part
                for (_, cells), (_, wire) in zip(receives, incoming, strict=True)
                for cell, part in zip(cells, wire.split([self._size(c) for c in cells]), strict=True)
            }
        loading.take(came)
        return counted

    def _receive_from_mailbox(self, loading: _Loading) -> Counter[str]:
        """Load cells from the mailbox, round by round; returns the bytes of each link, "from-to"."""
        where = self._stored(f"mailbox.{self._rank}.{self._pushes}")
        mailbox = Inbox(where, self._pushes * len(self._receives))
        counted: Counter[str] = Counter()
        for number, messages in enumerate(self._receives):
            cells = [cell for _, part in messages for cell in part]
            sizes = [self._size(cell) for cell in cells]
            flat = mailbox.wait(number, self._timeout, lambda: self._store.check([STOP]))
            parts = flat[: sum(sizes)].split(sizes)
            loading.take({tuple(cell): part for cell, part in zip(cells, parts, strict=True)})
            del flat, parts
            mailbox.took(number, is_last=number == len(self._receives) - 1)
            for source, part in messages:
                counted[f"{source}-{self._rank}"] += sum(self._size(cell) for cell in part)
        self._pushes += 1
        return counted

    def _stored(self, key: str) -> Any:
        """Read another rank's value in the group's store. Raises RuntimeError if the push failed there."""
        begin = time.monotonic()
        while not self._store.check([key]):
            if self._store.check([STOP]):
                raise RuntimeError("the push has failed at another rank")
            if time.monotonic() - begin > self._timeout:
                raise RuntimeError(f"the trainer's rank has made no mailbox for {self._timeout:g} s")
            time.sleep(STOP_POLL)
        return json.loads(self._store.get(key))

    def report(self, error: Exception) -> None:
        """Tell the trainer, if it still runs, that this rank failed in a push."""
        with contextlib.suppress(RuntimeError):  # torch raises it if the store's process has ended
            self._store.set(f"failed.{self._rank}", f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Leave the group. Ranks that wait for this one fail when nothing here uses the group any more."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _connect(self) -> None:
        """Read this rank's part of the plan, and let NCCL connect it with the ranks of its messages.

        It happens in a daemon thread: NCCL's call never returns if a rank has died. Raises RuntimeError if
        the trainer says so. Gloo connects all ranks when they join.
        """
        part = json.loads(zlib.decompress(self._store.get(f"plan.{self._rank}")))
        self._receives, self._sends = part["receives"], part["sends"]
        if self._group is None or not self._group.supports_coalescing:
            return
        errors: list[Exception] = []

        def meet() -> None:
            try:
                self._meet()
            except Exception as error:  # raised below
                errors.append(error)

        thread = threading.Thread(target=meet, name="connect", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(STOP_POLL)
            if thread.is_alive() and self._store.check([STOP]):
                raise RuntimeError("the push has failed at another rank")
        if errors:
            raise errors[0]

    def _meet(self) -> None:
        on_gpu = self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext():
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._group.broadcast([byte], dist.BroadcastOptions()).wait()
            sources = sorted({source for messages in self._receives for source, _ in messages})
            targets = sorted({target for messages in self._sends for target, _ in messages})
            incoming = [(source, torch.empty_like(byte)) for source in sources]
            for work in _exchange(self._group, [(target, byte) for target in targets], incoming):
                work.wait()
            if on_gpu:
                torch.cuda.current_stream().synchronize()

    def _wire(self, cells: Sequence[Sequence[int]]) -> torch.Tensor:
        """A buffer for the cells of a message, uint8 [bytes]."""
        size = sum(self._size(cell) for cell in cells)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

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


class _Loading:
    """Puts the cells of one push into tensors, and loads those that are complete, in one call a round."""

    def __init__(
        self,
        tables: list[tuple[str, torch.dtype, torch.Size]],
        receives: list[list[Message]],
        make: Callable[[int], FullTensor],
        load: Load,
    ) -> None:
        """`make` returns the tensor of a number, with memory for the parts that this rank receives."""
        self._remaining = Counter(cell[0] for messages in receives for _, cells in messages for cell in cells)
        self._units = _units(tables, self._remaining)
        # The tensors that are incomplete. All tensors of a model would not fit into memory.
        self._tensors: dict[int, FullTensor] = {}
        self._make, self._load = make, load

    def take(self, cells: dict[Cell, torch.Tensor]) -> None:
        """Take the cells of a round, uint8 [bytes] each."""
        complete: list[int] = []
        for cell, part in cells.items():
            number = cell[0]
            if number not in self._tensors:
                self._tensors[number] = self._make(number)
            _write(self._tensors[number], cell, part)
            self._remaining[number] -= 1
            if not any(self._remaining[other] for other in self._units[number]):
                complete += self._units[number]
        loadable = [(self._tensors[number].name, _loadable(self._tensors.pop(number))) for number in complete]
        if loadable:
            self._load(loadable)


def _exchange(
    group: Any, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, torch.Tensor]]
) -> list[Any]:
    """Begin to send and receive tensors, each to or from its rank; returns the operations to wait for.

    With NCCL they are one operation on the communicator that all ranks share. Messages that are not grouped
    would each get a communicator of two ranks, with buffers and a kernel of its own.
    """
    if not (outgoing or incoming):
        return []
    if group.supports_coalescing:
        group._start_coalescing()
    works = [group.send([wire], target, 0) for target, wire in outgoing]
    works += [group.recv([wire], source, 0) for source, wire in incoming]
    return [group._end_coalescing()] if group.supports_coalescing else works


def _write(tensor: FullTensor, cell: Sequence[int], part: torch.Tensor) -> None:
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
    """Return, by tensor number, the numbers of all tensors that must be loaded in the same call."""
    units: dict[str, list[int]] = {}
    for number in sorted(remaining):
        name = tables[number][0]
        together = _TOGETHER.match(name)
        units.setdefault(together[0] if together else name, []).append(number)
    return {number: unit for unit in units.values() for number in unit}
