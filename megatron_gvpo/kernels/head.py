"""The parts that all modes of the head share: settings, tiles of logits, and a backend's operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.kernels.mathematics import accumulator, addmm_, merge_statistics
from megatron_gvpo.kernels.supports import Supports

CHUNK_ROWS = 4096


class Tiles(ABC):
    """A backend's operations on a tile of logits z_rv [rows, columns], in the accumulator's dtype.

    The rows of z_rv are contiguous, and its content is lost. `labels_r` are column numbers of the tile; a
    number outside the tile means that another tile has the label. mathematics.py defines the statistics.
    """

    @abstractmethod
    def statistics_(self, z_rv: Tensor, labels_r: Tensor, entropy: bool) -> Tensor:
        """Return the statistics of the tile's columns."""

    @abstractmethod
    def stash_(self, z_rv: Tensor, labels_r: Tensor, out_rv: Tensor, entropy: bool) -> Tensor:
        """out_rv <- e^(z - row maximum); returns the statistics. out_rv may be z_rv itself."""

    @abstractmethod
    def gradient_(
        self,
        z_rv: Tensor,
        max_r: Tensor,
        offset_r: Tensor,
        slope_r: Tensor | None,
        labels_r: Tensor,
        g_r: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """e^(z - max) (offset + slope (z - max)) + 1[label] g in `dtype`."""


class Buffer:
    """Memory for one tile of logits, or chunk of rows, at a time."""

    def __init__(self, like: Tensor, numel: int, dtype: torch.dtype | None = None) -> None:
        """`dtype`: default: the accumulator's dtype of `like`, whose device it takes."""
        self._flat = like.new_empty(numel, dtype=accumulator(like.dtype) if dtype is None else dtype)

    def tile(self, rows: int, columns: int) -> Tensor:
        return self._flat[: rows * columns].view(rows, columns)


@dataclass(frozen=True)
class Head:
    """The settings of one call of `linear_logprob`, for all modes."""

    columns: int  # rows of W's shard that are tokens; the padding after them is never touched
    temperature: float | Tensor  # one number for all rows, or [r] in the accumulator's dtype
    entropy: bool
    tp_group: dist.ProcessGroup | None
    logits_bytes: int  # most bytes of one tile
    stash_rows: int  # the first rows: their exponentials are kept for the backward
    stash_dtype: torch.dtype  # of exponentials, until both products are computed
    tiles: Tiles
    supports: Supports | None = None  # of all rows, in this shard's columns; None: the whole vocabulary

    def slices(self, total: int, across: int, itemsize: int) -> list[slice]:
        """Cut `total` into slices such that a tile, one slice by `across` numbers, fits logits_bytes."""
        step = max(1, self.logits_bytes // (itemsize * max(across, 1)))
        if step > 16:  # products are faster with aligned rows; a GPU's compute 128 rows at a time
            step -= step % (128 if step >= 512 else 16)
        return _cut(total, step)

    def chunks(self, total: int, across: int, dtype: torch.dtype) -> list[slice]:
        """Cut `total` rows of `across` numbers for products over all columns of a chunk.

        `dtype`: the accumulator's. A chunk in a smaller dtype has CHUNK_ROWS rows, however many tiles that
        takes: each chunk's product reads and writes all of dW. In the accumulator's dtype a chunk is a tile.
        """
        if self.stash_dtype == dtype:
            return self.slices(total, across, dtype.itemsize)
        return _cut(total, CHUNK_ROWS)

    def temperature_of(self, rows: slice) -> float | Tensor:
        return self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature

    def logits(
        self, tile_rv: Tensor, x_rh: Tensor, w_vh: Tensor, rows: slice, first_column: int = 0
    ) -> Tensor:
        """tile_rv <- x_rh w_vh^T / T, and HIDDEN outside the rows' supports.

        `rows`: the head's rows that x_rh holds; `first_column`: the shard's column that w_vh begins with.
        """
        if isinstance(self.temperature, Tensor):  # divide the fp32 result, not the bf16 operands
            addmm_(tile_rv, x_rh, w_vh.T, beta=0).div_(self.temperature[rows, None])
        else:
            addmm_(tile_rv, x_rh, w_vh.T, beta=0, alpha=1 / self.temperature)
        if self.supports is not None:
            self.supports.hide_(tile_rv, rows, first_column)
        return tile_rv

    def merge_over_tp(self, stats_sr: Tensor) -> Tensor:
        if self.tp_group is None or stats_sr.shape[1] == 0:
            return stats_sr
        stats_ksr = stats_sr.new_empty(self.tp_group.size(), *stats_sr.shape)
        dist.all_gather(list(stats_ksr), stats_sr, self.tp_group)
        return merge_statistics(stats_ksr)


def _cut(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def length(part: slice) -> int:
    return int(part.stop - part.start)


def longest(parts: list[slice]) -> int:
    return max(map(length, parts), default=0)
