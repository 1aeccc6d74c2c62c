"""The weight stream cut into buckets: the bytes of some tensors, one after another, in one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.weights.fp8 import SCALE


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a weight push, by its Hugging Face name."""

    name: str
    dtype: str  # "bfloat16", "float32", ...
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """`flat` uint8 [bytes] holds the tensors of `specs` in order. The next bucket but one overwrites it."""

    specs: list[TensorSpec]
    flat: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) views into the buffer."""
        offset = 0
        for spec in self.specs:
            dtype = getattr(torch, spec.dtype)
            size = torch.Size(spec.shape).numel() * dtype.itemsize
            yield spec.name, self.flat[offset : offset + size].view(dtype).view(spec.shape)
            offset += size


class DoubleBuffer:
    """Two buffers for buckets, `limit` bytes together, used in turn: one is filled while the other is sent.

    On a CPU they are kept from push to push, because fresh pages cost several times what filling them does.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = max(1, limit // 2)  # bytes of one
        self._device = device
        self._buffers: list[Tensor] = []

    def next(self, size: int) -> Tensor:
        """The buffer whose turn it is, uint8, of at least `limit` and `size` bytes."""
        buffer = self._buffers.pop(0) if len(self._buffers) == 2 else None
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(max(size, self.limit), dtype=torch.uint8, device=self._device)
        self._buffers.append(buffer)
        return buffer

    def rest(self) -> None:
        """Give an accelerator's memory back until the next push."""
        if self._device.type != "cpu":
            self._buffers.clear()


def buckets(
    stream: Iterable[tuple[str, Tensor]], halves: DoubleBuffer, dtype: torch.dtype
) -> Iterator[Bucket]:
    """Cut (Hugging Face name, tensor) into buckets of at most `halves.limit` bytes, in `dtype`.

    A bucket may be used until the next but one is asked for. A tensor larger than the limit is a bucket of
    its own, in a buffer that grows for it. What is not floating point, or quantised, or the scale of
    something quantised keeps its type. Every tensor's offset is a multiple of its element size: one whose
    offset would not be starts a new bucket.
    """
    specs: list[TensorSpec] = []
    buffer, filled = torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in stream:
        exact = tensor.itemsize == 1 or name.endswith(SCALE) or not tensor.is_floating_point()
        wire = tensor.dtype if exact else dtype
        size = tensor.numel() * wire.itemsize
        if specs and (filled + size > halves.limit or filled % wire.itemsize):
            yield Bucket(specs, buffer[:filled])
            specs, filled = [], 0
        if not specs:
            buffer = halves.next(size)
        buffer[filled : filled + size].view(wire).view(tensor.shape).copy_(tensor)
        specs.append(TensorSpec(name, str(wire).removeprefix("torch."), tuple(tensor.shape)))
        filled += size
    if specs:
        yield Bucket(specs, buffer[:filled])
