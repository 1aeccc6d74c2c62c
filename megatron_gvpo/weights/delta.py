"""Sends only changes: positions and values of the elements that differ in any bit from the last push.

At the learning rates of post-training most bf16 weights do not change in a step, because the update is below
half a unit in their last place. Rank 0 keeps a copy of the weights that it sent, on the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.server import Server
from megatron_gvpo.weights.broadcast import GroupReceiver, GroupTransport
from megatron_gvpo.weights.bucket import Bucket, TensorSpec
from megatron_gvpo.weights.group import Rendezvous
from megatron_gvpo.weights.transport import each

_MOST = 2**31  # elements whose positions fit into int32; a larger tensor is sent in full
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Patch:
    """The changes of one tensor: positions and values of `count` elements; with -1 the values of all."""

    spec: TensorSpec
    count: int


class DeltaReceiver(GroupReceiver):
    """The calls to a server that a broadcast of patches needs."""

    @abstractmethod
    async def receive_patches(
        self, patches: Sequence[Patch], size: int, rendezvous: Rendezvous, timeout: float
    ) -> None:
        """Take a broadcast of `size` bytes: the int32 positions of all patches, then their values."""

    @abstractmethod
    async def check_patches(self, timeout: float) -> None:
        """Refuse a push, after all patches, if a broadcast failed or they changed other elements too."""


class Delta(GroupTransport[DeltaReceiver]):
    """Broadcasts patches; whole tensors if those are smaller, or if a server lacks the last push."""

    def __init__(
        self, receiver: Callable[[Server], DeltaReceiver], address: str, backend: str, timeout: float
    ) -> None:
        super().__init__(receiver, address, backend, timeout)
        self._sent: dict[str, Tensor] = {}  # last sent weights, on the host
        self._sent_version = -1  # -1: some server may lack `_sent`
        self._changed = self._elements = 0
        self._sparse = False

    @property
    def metrics(self) -> dict[str, float]:
        """Adds `sync/changed`, the share of elements that changed, unless the push was of whole tensors."""
        sparse = self._sparse and self._elements
        return super().metrics | ({"sync/changed": self._changed / self._elements} if sparse else {})

    async def begin(self, handles: Sequence[ServerHandle], version: int) -> None:
        self._sparse = self._sent_version >= 0 and all(
            handle.version == self._sent_version for handle in handles
        )
        self._sent_version, self._changed, self._elements = -1, 0, 0
        await super().begin(handles, version)

    async def send(self, bucket: Bucket) -> int:
        patches, positions, values = [], [], []
        for spec, (name, tensor) in zip(bucket.specs, bucket.tensors(), strict=True):
            flat = tensor.reshape(-1)
            position = self._difference(name, flat)
            count = -1
            if position is not None and len(position) * (4 + flat.itemsize) < flat.nbytes:
                count = len(position)
                positions.append(position.to(torch.int32))
                flat = flat[position]
            patches.append(Patch(spec, count))
            values.append(flat)
        parts = [part.contiguous().view(torch.uint8) for part in (*positions, *values)]
        wire = torch.cat(parts)

        async def post(handle: ServerHandle, rendezvous: Rendezvous) -> None:
            receiver = self._receiver(handle.server)
            await receiver.receive_patches(patches, len(wire), rendezvous, self._timeout)

        await self._deliver(wire, post)
        return len(wire)

    async def end(self) -> None:
        # The check runs also after whole tensors: a server answers as usual even if a broadcast failed there.
        async with self._whole_or_discarded():
            await each(
                self._handles, lambda handle: self._receiver(handle.server).check_patches(self._timeout)
            )
        await super().end()
        self._sent_version = self._version

    def _difference(self, name: str, flat: Tensor) -> Tensor | None:
        """Positions, int64, where `flat` differs from the tensor sent last; None: send all of it.

        `flat` becomes the tensor sent last. Raises ValueError for NaN.
        """
        if torch.isnan(flat).any():
            raise ValueError(f"weight {name} is not a number: training diverged")
        old = self._sent.get(name)
        if old is None:
            self._sent[name] = flat.to("cpu", copy=True)
            return None
        bits = _BITS[flat.itemsize]
        position = (flat.view(bits) != old.to(flat.device).view(bits)).nonzero().squeeze(1)
        old.copy_(flat)
        if not self._sparse or len(flat) > _MOST:
            return None
        self._changed += len(position)
        self._elements += len(flat)
        return position
