"""A trainer rank's side of a sharded push: it reads the parts that it sends from its own weights."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_gvpo.weights.bucket import sent_as
from megatron_gvpo.weights.group import Membership
from megatron_gvpo.weights.shards.plan import Cell, Message, unpack_sends

if TYPE_CHECKING:
    from megatron_gvpo.megatron.model.own_weights import OwnPart, OwnWeights

POLL = 0.001  # seconds between looks at a message
STOP_POLL = 0.05  # seconds between questions whether the push has failed elsewhere
AHEAD = 2  # rounds that are sent at the same time


class Stopped(Exception):  # noqa: N818 - an outcome that the transport deals with
    """The push failed at another rank or server, or a message took too long."""


class Sender:
    """One rank's sends over one group, push after push. `stopped` says if the push has failed elsewhere."""

    def __init__(
        self, member: Membership, dtype: torch.dtype, timeout: float, stopped: Callable[[], bool]
    ) -> None:
        self._member, self._dtype, self._timeout, self._stopped = member, dtype, timeout, stopped
        self._rounds: list[list[Message]] | None = None
        self._parts: dict[int, list[OwnPart]] = {}  # by number of the tensor
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def tell(self, own: OwnWeights) -> None:
        """Tell rank 0 which parts of which tensors this rank holds, and their dtypes."""
        held = [[p.name, self._wire(own, p), p.top, p.bottom, p.left, p.right] for p in own.parts]
        packed: Any = zlib.compress(json.dumps(held).encode(), 1)  # torch's stubs want a str
        self._member.store.set(f"held.{self._member.rank}", packed)

    def send(self, own: OwnWeights) -> None:
        """Send this rank's part of a push. Raises Stopped, and torch's RuntimeError if a server has died."""
        if self._rounds is None:
            self._connect(own)
        assert self._rounds is not None
        counted: Counter[str] = Counter()
        under_way: list[list[Any]] = []
        for number, messages in enumerate(self._rounds):
            while len(under_way) >= AHEAD:
                self._wait(under_way.pop(0))
            under_way.append([])
            for message in messages:
                wire = self._fill(own, message, number % AHEAD)
                under_way[-1].append(self._member.group.send([wire], message.target, 0))
                counted[f"{message.source}-{message.target}"] += len(wire)
        for works in under_way:
            self._wait(works)
        self._member.store.set(f"counted.{self._member.rank}", json.dumps(counted))

    def close(self) -> None:
        """Leave the group. Other ranks' pending receives from this one fail."""
        self._member.group.abort()

    def _connect(self, own: OwnWeights) -> None:
        """Read this rank's part of the plan, and try each link: all ranks try theirs in one order."""
        store, rank = self._member.store, self._member.rank
        numbers = {table[0]: i for i, table in enumerate(json.loads(zlib.decompress(store.get("tables"))))}
        self._rounds = unpack_sends(store.get(f"plan.{rank}"), rank)
        for part in own.parts:
            self._parts.setdefault(numbers.get(part.name, -1), []).append(part)
        device = own.tensors[0].device
        for target in sorted({message.target for messages in self._rounds for message in messages}):
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            self._wait([self._member.group.send([byte], target, 0)])

    def _wait(self, works: Sequence[Any]) -> None:
        """Wait until messages are sent.

        Gloo's end with an error when the other end's process ends or leaves the group, or after the group's
        timeout. NCCL's may never end, so there this rank asks whether the push has failed elsewhere.
        """
        begin = asked = time.monotonic()
        for work in works:
            while self._member.backend == "nccl" and not work.is_completed():
                now = time.monotonic()
                if now - asked > STOP_POLL:
                    asked = now
                    if self._stopped():
                        raise Stopped("the push failed elsewhere")
                if now - begin > self._timeout:
                    raise Stopped(f"a message took over {self._timeout:g} s")
                time.sleep(POLL)
            work.wait()

    def _fill(self, own: OwnWeights, message: Message, turn: int) -> Tensor:
        """The bytes of a message, uint8, in the buffer that its target has in this turn."""
        views = [self._view(own, cell) for cell in message.cells]
        wire_types = [sent_as(view.dtype, self._dtype) for view in views]
        sizes = [v.numel() * t.itemsize for v, t in zip(views, wire_types, strict=True)]
        total, key = sum(sizes), (message.target, turn)
        if key not in self._buffers or len(self._buffers[key]) < total:
            self._buffers[key] = torch.empty(total, dtype=torch.uint8, device=views[0].device)
        wire = self._buffers[key][:total]
        places = wire.split(sizes)
        for view, kind, place in zip(views, wire_types, places, strict=True):
            if place.storage_offset() % kind.itemsize:  # an element would lie between two addresses
                place.copy_(view.to(kind).contiguous().view(torch.uint8).view(-1))
            else:
                place.view(kind).view(view.shape).copy_(view)
        return wire

    def _view(self, own: OwnWeights, cell: Cell) -> Tensor:
        top, bottom, left, right = cell.box
        for part in self._parts[cell.tensor]:
            if part.top <= top and bottom <= part.bottom and part.left <= left and right <= part.right:
                return own.read(part)[
                    top - part.top : bottom - part.top, left - part.left : right - part.left
                ]
        raise AssertionError(f"rank {self._member.rank} does not hold {cell}, and is to send it")

    def _wire(self, own: OwnWeights, part: OwnPart) -> str:
        return str(sent_as(own.tensors[part.source].dtype, self._dtype)).removeprefix("torch.")
