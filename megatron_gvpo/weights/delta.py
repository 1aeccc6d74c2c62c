"""Weights by their changes: positions and values of the elements that differ from the last push, bit for bit.

At the learning rates of post-training most bf16 weights do not change in a step: the update is below half a
unit in their last place. Rank 0 keeps a copy of what it sent, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_gvpo.rollout.pool import Member
from megatron_gvpo.rollout.server import Patch, Rendezvous
from megatron_gvpo.weights.broadcast import Broadcast
from megatron_gvpo.weights.bucket import Bucket

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Delta(Broadcast):
    """Broadcasts patches, or whole tensors where they are smaller or a server lacks what was sent last."""

    def __init__(self, address: str, backend: str, timeout: float) -> None:
        super().__init__(address, backend, timeout)
        self._sent: dict[str, Tensor] = {}  # on the host
        self._sent_version = -1  # -1: not every server is known to have `_sent`
        self._changed = self._elements = 0
        self._sparse = False

    @property
    def metrics(self) -> dict[str, float]:
        """With the share of the elements that changed since the push before, unless it was a whole push."""
        sparse = self._sparse and self._elements
        return super().metrics | ({"sync/changed": self._changed / self._elements} if sparse else {})

    async def begin(self, members: Sequence[Member], version: int) -> None:
        self._sparse = self._sent_version >= 0 and all(m.version == self._sent_version for m in members)
        self._sent_version, self._changed, self._elements = -1, 0, 0
        await super().begin(members, version)

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
        await self._deliver(
            wire, lambda m, meeting: m.server.receive_patches(patches, len(wire), meeting, self._timeout)
        )
        return len(wire)

    async def end(self) -> None:
        if self._sparse:
            async with self._whole_or_discarded():
                await self._all(lambda m: m.server.check_patches(self._timeout))
        await super().end()
        self._sent_version = self._version

    def prefixes(self, member: Member, meeting: Rendezvous) -> Sequence[str]:
        """None: the receivers of patches are our own, and join with the bare store."""
        return []

    async def join(self, member: Member, meeting: Rendezvous, rank_offset: int) -> None:
        await member.server.join_for_patches(meeting, rank_offset, self._timeout)

    async def leave(self, member: Member, meeting: Rendezvous) -> None:
        await member.server.leave_patches(meeting, 5.0)

    def _difference(self, name: str, flat: Tensor) -> Tensor | None:
        """Positions (int64) where it differs from what was sent last, which it becomes; None: send it all."""
        if torch.isnan(flat).any():
            raise ValueError(f"weight {name} is not a number: training diverged")
        old = self._sent.get(name)
        if old is None:
            self._sent[name] = flat.to("cpu", copy=True)
            return None
        bits = _BITS[flat.itemsize]
        position = (flat.view(bits) != old.to(flat.device).view(bits)).nonzero().squeeze(1)
        old.copy_(flat)
        if not self._sparse:
            return None
        self._changed += len(position)
        self._elements += len(flat)
        return position
