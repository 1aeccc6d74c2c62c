"""Cuts the weight stream into buckets: the bytes of some tensors, one after another, in one buffer."""

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
    """The tensors of `specs`, in order, in `flat`, uint8 [bytes]. The bucket after the next overwrites it."""

    specs: list[TensorSpec]
    flat: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs; the tensors are views into `flat`."""
        offset = 0
        for spec in self.specs:
            dtype = getattr(torch, spec.dtype)
            size = torch.Size(spec.shape).numel() * dtype.itemsize
            yield spec.name, self.flat[offset : offset + size].view(dtype).view(spec.shape)
            offset += size


class DoubleBuffer:
    """Two buffers for buckets, together of `limit` bytes: one is filled while the other is sent.

    On a CPU they are kept from push to push, because fresh pages cost several times as much as filling them.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = max(1, limit // 2)  # bytes of one buffer
        self._device = device
        self._buffers: list[Tensor] = []

    def next(self, size: int) -> Tensor:
        """The next buffer in turn, uint8, of at least `limit` and at least `size` bytes."""
        buffer = self._buffers.pop(0) if len(self._buffers) == 2 else None
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(max(size, self.limit), dtype=torch.uint8, device=self._device)
        self._buffers.append(buffer)
        return buffer

    def rest(self) -> None:
        """Free the buffers until the next push, if they are on an accelerator."""
        if self._device.type != "cpu":
            self._buffers.clear()


def buckets(
    stream: Iterable[tuple[str, Tensor]], halves: DoubleBuffer, dtype: torch.dtype
) -> Iterator[Bucket]:
    """Cut a stream of (Hugging Face name, tensor) into buckets of at most `halves.limit` bytes, in `dtype`.

    A bucket is valid until the one after the next is requested. A tensor larger than the limit gets a bucket
    of its own, for which a buffer grows. Tensors keep their dtype if they are not of floating point, or are
    quantised (one byte an element), or are the scales of a quantised tensor. Every tensor's offset is a
    multiple of its element size; a tensor whose offset would not be starts a new bucket.
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
