"""Tensors of which this rank has parts, for the plugins in both engines.

An engine's checkpoint loader takes whole tensors and copies the part that its rank holds. A `Slice` stands
for a whole tensor and has no memory of its own: the loader narrows it, and the values that it then copies are
taken from the parts that the rank has. Before the first push the loaders run once with slices that have no
parts, which only note the boxes that would be copied: these are the rank's layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Box = tuple[int, int, int, int]  # rows from, to (without), columns from, to


class FullTensor:
    """A whole tensor, as a table: its first dimension is the rows, all others are the columns."""

    def __init__(self, name: str, dtype: torch.dtype, shape: Iterable[int]) -> None:
        self.name, self.dtype, self.shape = name, dtype, torch.Size(shape)
        self.rows = self.shape[0] if self.shape else 1
        self.columns = self.shape.numel() // max(1, self.rows)
        self.copied: set[Box] = set()
        self.parts: dict[Box, torch.Tensor] | None = None  # each [rows, columns]; None: copies are only noted

    @property
    def everything(self) -> Box:
        return (0, self.rows, 0, self.columns)

    def needed(self) -> list[Box]:
        """The boxes that were copied, without those inside others."""
        boxes = sorted(self.copied)
        return [b for b in boxes if not any(_inside(b, other) and b != other for other in boxes)]

    def part(self, view: torch.Tensor) -> torch.Tensor:
        """The values of a view of the whole tensor. Raises RuntimeError if this rank did not get them."""
        assert self.parts is not None
        top, bottom, left, right = box = _box(view, self)
        for own, values in self.parts.items():
            if _inside(box, own):
                width = own[3] - own[2]
                strides = [_rows(s, self) * width if _rows(s, self) else s for s in view.stride()]
                return values.as_strided(view.shape, strides, (top - own[0]) * width + left - own[2])
        raise RuntimeError(
            f"{self.name}: the engine copies rows {top} to {bottom - 1}, columns {left} to {right - 1}, and "
            "did not when its layout was learned"
        )


class Slice(torch.Tensor):
    """Stands for a whole tensor, or a view of one. The tensor is on the meta device."""

    _full: FullTensor | None  # None: the result of an operation other than a view, in the first run

    @staticmethod
    def of(tensor: FullTensor) -> Slice:
        return _as_slice(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and isinstance(args[1], Slice):
            return _copy(args[0], args[1])
        if func is torch.Tensor.__setitem__ and isinstance(args[2], Slice):
            return _copy(args[0][args[1]], args[2])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                return _wrap(result, args, kwargs)
            if isinstance(result, tuple | list):
                return type(result)(
                    _wrap(r, args, kwargs) if isinstance(r, torch.Tensor) else r for r in result
                )
            return result


def _copy(target: torch.Tensor, source: Slice) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        tensor = source._full
        if target.device.type == "meta":  # vLLM counts the elements that will come
            return target.copy_(torch.empty(source.shape, dtype=source.dtype, device="meta"))
        if tensor is None or not source.numel():  # a rank may hold nothing but padding
            return target
        if tensor.parts is None:
            tensor.copied.add(_box(source, tensor))
            return target
        return target.copy_(tensor.part(source))


def _wrap(result: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """A view of a slice is a slice. Any other operation needs the slice's tensor in full."""
    slices = [a for a in _leaves((args, kwargs)) if isinstance(a, Slice)]
    for part in slices:
        if result.untyped_storage()._cdata == part.untyped_storage()._cdata and result.dtype == part.dtype:
            return _as_slice(result, part._full)
    for tensor in {part._full for part in slices} - {None}:
        assert tensor is not None
        if tensor.parts is not None:
            raise RuntimeError(
                f"{tensor.name}: the engine computes with it, and this rank has only a part of it"
            )
        tensor.copied.add(tensor.everything)
    return _as_slice(result, None) if slices and result.device.type == "meta" else result


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _as_slice(tensor: torch.Tensor, full: FullTensor | None) -> Slice:
    made = tensor.as_subclass(Slice)
    made._full = full
    return made


def _box(view: torch.Tensor, full: FullTensor) -> Box:
    """The smallest box, of full rows or within them, that holds all elements of a view."""
    top, left = divmod(int(view.storage_offset()), max(1, full.columns))
    extent = [(size - 1, stride) for size, stride in zip(view.shape, view.stride(), strict=True)]
    down = sum(steps * _rows(stride, full) for steps, stride in extent)
    right = left + sum(steps * stride for steps, stride in extent if not _rows(stride, full)) + 1
    if right <= full.columns:
        return (top, top + down + 1, left, right)
    return full.everything


def _rows(stride: int, full: FullTensor) -> int:
    """The rows that a stride spans; 0 for a stride between columns."""
    return 0 if stride % max(1, full.columns) else stride // max(1, full.columns)


def _inside(box: Box, other: Box) -> bool:
    return other[0] <= box[0] and box[1] <= other[1] and other[2] <= box[2] and box[3] <= other[3]
