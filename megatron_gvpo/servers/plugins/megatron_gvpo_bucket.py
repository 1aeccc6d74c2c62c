"""The layout of weight buckets, for the plugins in both engines: the bytes of tensors, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron_gvpo_allowed_paths import in_memory


class BucketLayout:
    """Names, dtypes and shapes of a bucket's tensors, in order."""

    def __init__(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        self._names = names
        self._dtypes = [getattr(torch, dtype) for dtype in dtypes]
        self._shapes = [torch.Size(shape) for shape in shapes]
        pairs = zip(self._shapes, self._dtypes, strict=True)
        self._sizes = [shape.numel() * dtype.itemsize for shape, dtype in pairs]

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    def views(self, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs; the tensors are views into `flat`, uint8 [nbytes]."""
        parts = zip(self._names, self._dtypes, self._shapes, flat.split(self._sizes), strict=True)
        return [(name, part.view(dtype).view(shape)) for name, dtype, shape, part in parts]

    def mapped(self, file: str) -> torch.Tensor:
        """The bucket's bytes in a file in shared memory, uint8 [nbytes], mapped without a copy.

        Raises PermissionError for a file elsewhere, ValueError for one with fewer bytes.
        """
        return mapped(file, self.nbytes)


def mapped(file: str, size: int) -> torch.Tensor:
    """The first `size` bytes of a file in shared memory, uint8, mapped without a copy.

    Raises PermissionError for a file elsewhere, ValueError for one with fewer bytes.
    """
    path = in_memory(file)
    if path.stat().st_size < size:  # torch would make it longer
        raise ValueError(f"{file}: {path.stat().st_size:,} bytes, and the bucket has {size:,}")
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
