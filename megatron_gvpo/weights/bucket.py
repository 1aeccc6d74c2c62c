"""Cuts the weight stream into buckets: the bytes of some tensors, one after another, in one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_FUSED = ("kv_a_proj_with_mqa", "q_a_proj")  # down-projections of latent attention, which engines fuse


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
    """Two buffers for buckets, of `limit` bytes together: one is filled while the other is sent.

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


def sent_as(kind: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a push of a run in `dtype` sends a tensor that the trainer holds as `kind`.

    Floating-point tensors are sent as `dtype`, except those that are kept in a higher precision: routers
    choose experts by biases in float32, which differ by less than a step of bfloat16. Scales of quantised
    tensors are float32, too. Integers and quantised tensors (one byte an element) go as they are.
    """
    exact = kind.itemsize == 1 or not kind.is_floating_point
    return kind if exact else torch.promote_types(kind, dtype)


def loaded_together(stream: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors of a stream; those that a server must load in one call in one list.

    SGLang (0.5.23) keeps the two down-projections of latent attention as one weight, and fills it only if
    both come in the same call: it drops one that comes without the other. So the first waits for the second,
    or for the end of a stream that has none. Both have the same dtype.
    """
    waiting: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in stream:
        if not any(part in name for part in _FUSED):
            yield [(name, tensor)]
            continue
        key = name.replace(*_FUSED)
        if (other := waiting.pop(key, None)) is None:
            waiting[key] = (name, tensor)
        else:
            yield [other, (name, tensor)]
    for alone in waiting.values():
        yield [alone]


def buckets(
    stream: Iterable[tuple[str, Tensor]], halves: DoubleBuffer, dtype: torch.dtype
) -> Iterator[Bucket]:
    """Cut a stream of (Hugging Face name, tensor) into buckets of at most `halves.limit` bytes.

    `dtype`: the run's (`sent_as`). A bucket is valid until the one after the next is requested. A tensor
    larger than the limit gets a bucket of its own, for which a buffer grows; so do tensors that servers must
    get in one bucket (`loaded_together`). Every tensor's offset is a multiple of its element size; a tensor
    whose offset would not be starts a new bucket.
    """
    specs: list[TensorSpec] = []
    buffer, filled = torch.empty(0, dtype=torch.uint8), 0
    for unit in loaded_together(stream):
        wires = [sent_as(tensor.dtype, dtype) for _, tensor in unit]
        sizes = [tensor.numel() * wire.itemsize for (_, tensor), wire in zip(unit, wires, strict=True)]
        if specs and (filled + sum(sizes) > halves.limit or filled % wires[0].itemsize):
            yield Bucket(specs, buffer[:filled])
            specs, filled = [], 0
        if not specs:
            buffer = halves.next(sum(sizes))
        for (name, tensor), wire, size in zip(unit, wires, sizes, strict=True):
            buffer[filled : filled + size].view(wire).view(tensor.shape).copy_(tensor)
            specs.append(TensorSpec(name, str(wire).removeprefix("torch."), tuple(tensor.shape)))
            filled += size
    if specs:
        yield Bucket(specs, buffer[:filled])
