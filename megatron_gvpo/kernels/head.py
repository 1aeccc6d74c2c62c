"""The parts that all modes of the head share: settings, tiles of logits, and a backend's operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.kernels.mathematics import accumulator, addmm_, empty_statistics, merge_statistics, operand
from megatron_gvpo.kernels.supports import Supports


class Tiles(ABC):
    """A backend's operations on a tile of logits z_rv [rows, columns], in the accumulator's dtype.

    The rows of z_rv are contiguous. `labels_r` are column numbers of the tile; a number outside the tile
    means that another tile has the label. mathematics.py defines `stats_sr`. The content of z_rv after
    `statistics_` is private to the backend: only its `weights_first_gradient_` reads it.
    """

    @abstractmethod
    def statistics_(self, z_rv: Tensor, labels_r: Tensor, entropy: bool) -> Tensor:
        """Return the statistics of the tile's columns."""

    @abstractmethod
    def stash_(self, z_rv: Tensor, labels_r: Tensor, out_rv: Tensor) -> Tensor:
        """out_rv <- e^(z - row maximum); returns the statistics. out_rv may be z_rv itself."""

    @abstractmethod
    def weights_first_gradient_(
        self,
        z_rv: Tensor,
        piece_sr: Tensor,
        merged_sr: Tensor,
        labels_r: Tensor,
        g_r: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """g (1[label] - p) in `dtype`, for a tile after `statistics_`, which returned `piece_sr`."""

    @abstractmethod
    def weights_last_gradient_(
        self,
        z_rv: Tensor,
        max_r: Tensor,
        offset_r: Tensor,
        slope_r: Tensor | None,
        labels_r: Tensor,
        g_r: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """e^(z - max) (offset + slope (z - max)) + 1[label] g in `dtype`, for a tile of logits."""

    def scan(self, head: Head, x_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, rows: slice) -> Tensor:
        """Return the statistics of all columns of the shard; `rows`: the head's rows that x_rh holds.

        This default goes tile by tile and reads every row of W once, for all tokens.
        """
        dtype = accumulator(weight_vh.dtype)
        slices = head.slices(head.columns, len(x_rh), dtype.itemsize)
        buffer = Buffer(x_rh, len(x_rh) * longest(slices))
        stats_sr = empty_statistics(labels_r, dtype, head.entropy)
        for columns in slices:
            tile_rv = buffer.tile(len(x_rh), length(columns))
            z_rv = head.logits(tile_rv, x_rh, operand(weight_vh[columns]), rows, columns.start)
            piece_sr = self.statistics_(z_rv, labels_r - columns.start, head.entropy)
            stats_sr = merge_statistics(torch.stack((stats_sr, piece_sr)))
        return stats_sr


class Buffer:
    """Memory for one tile of logits at a time."""

    def __init__(self, like: Tensor, numel: int) -> None:
        self._flat = like.new_empty(numel, dtype=accumulator(like.dtype))

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
    stash_dtype: torch.dtype
    tiles: Tiles
    supports: Supports | None = None  # of all rows, in this shard's columns; None: the whole vocabulary

    def slices(self, total: int, across: int, itemsize: int) -> list[slice]:
        """Cut `total` into slices such that a tile, one slice by `across` numbers, fits logits_bytes."""
        step = max(1, self.logits_bytes // (itemsize * max(across, 1)))
        if step > 16:
            step -= step % 16  # matrix products are faster with aligned rows
        return [slice(start, min(start + step, total)) for start in range(0, total, step)]

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


def length(part: slice) -> int:
    return int(part.stop - part.start)


def longest(parts: list[slice]) -> int:
    return max(map(length, parts), default=0)
