"""What the modes of the head share: its settings, its tiles of logits, and what a backend does to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.kernels import softmax
from megatron_gvpo.kernels.products import accumulator, addmm_, operand


class Tiles(ABC):
    """What is done to a tile of logits z_rv [rows, columns], in the accumulator's dtype; rows are contiguous.

    `labels_r` are columns of the tile; one that is not means that another tile has the label. `stats_sr` as
    in softmax.py. What z_rv holds after `statistics_` is the backend's own, for its `known_gradient_`.
    """

    @abstractmethod
    def statistics_(self, z_rv: Tensor, labels_r: Tensor, entropy: bool) -> Tensor:
        """The statistics of the tile's columns."""

    @abstractmethod
    def stash_(self, z_rv: Tensor, labels_r: Tensor, out_rv: Tensor) -> Tensor:
        """out_rv <- e^(z - its row maximum); it may be z_rv itself. Returns the statistics."""

    @abstractmethod
    def known_gradient_(
        self,
        z_rv: Tensor,
        piece_sr: Tensor,
        merged_sr: Tensor,
        labels_r: Tensor,
        g_r: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """g (1[label] - p) in `dtype`, of a tile that went through `statistics_`, which found `piece_sr`."""

    @abstractmethod
    def late_gradient_(
        self,
        z_rv: Tensor,
        max_r: Tensor,
        offset_r: Tensor,
        slope_r: Tensor | None,
        labels_r: Tensor,
        g_r: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """e^(z - max) (offset + slope (z - max)) + 1[label] g in `dtype`, of a tile of logits."""

    def scan(self, head: Head, x_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, rows: slice) -> Tensor:
        """The statistics of all the shard's columns; `rows`: which of the head's rows x_rh are.

        Here tile by tile: every row of W is visited once, for all tokens.
        """
        dtype = accumulator(weight_vh.dtype)
        slices = head.slices(head.columns, len(x_rh), dtype.itemsize)
        buffer = Buffer(x_rh, len(x_rh) * longest(slices))
        stats_sr = softmax.no_columns(labels_r, dtype, head.entropy)
        for columns in slices:
            tile_rv = buffer.tile(len(x_rh), length(columns))
            z_rv = head.logits(tile_rv, x_rh, operand(weight_vh[columns]), rows)
            piece_sr = self.statistics_(z_rv, labels_r - columns.start, head.entropy)
            stats_sr = softmax.merge(torch.stack((stats_sr, piece_sr)))
        return stats_sr


class Buffer:
    """Memory for one tile of logits at a time."""

    def __init__(self, like: Tensor, numel: int) -> None:
        self._flat = like.new_empty(numel, dtype=accumulator(like.dtype))

    def tile(self, rows: int, columns: int) -> Tensor:
        return self._flat[: rows * columns].view(rows, columns)


@dataclass(frozen=True)
class Head:
    """What all modes need besides the tensors."""

    columns: int  # rows of the shard that are tokens; the padding after them is never touched
    temperature: float | Tensor  # one for all rows, or [r] in the accumulator's dtype
    entropy: bool
    tp_group: dist.ProcessGroup | None
    logits_bytes: int  # of one tile
    stash_rows: int  # rows whose exponentials are kept for the backward
    stash_dtype: torch.dtype
    tiles: Tiles

    def slices(self, total: int, across: int, itemsize: int) -> list[slice]:
        """Slices of `total` such that a tile, one slice by `across` numbers, keeps to logits_bytes."""
        step = max(1, self.logits_bytes // (itemsize * max(across, 1)))
        if step > 16:
            step -= step % 16  # matrix products want aligned rows
        return [slice(start, min(start + step, total)) for start in range(0, total, step)]

    def temperature_of(self, rows: slice) -> float | Tensor:
        return self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature

    def logits(self, tile_rv: Tensor, x_rh: Tensor, w_vh: Tensor, rows: slice) -> Tensor:
        """tile_rv <- x_rh w_vh^T / T; `rows`: which of the head's rows x_rh are."""
        if isinstance(self.temperature, Tensor):  # divided here in fp32, not in the operands' bf16
            return addmm_(tile_rv, x_rh, w_vh.T, beta=0).div_(self.temperature[rows, None])
        return addmm_(tile_rv, x_rh, w_vh.T, beta=0, alpha=1 / self.temperature)

    def merge_over_tp(self, stats_sr: Tensor) -> Tensor:
        if self.tp_group is None or stats_sr.shape[1] == 0:
            return stats_sr
        stats_ksr = stats_sr.new_empty(self.tp_group.size(), *stats_sr.shape)
        dist.all_gather(list(stats_ksr), stats_sr, self.tp_group)
        return softmax.merge(stats_ksr)


def length(part: slice) -> int:
    return int(part.stop - part.start)


def longest(parts: list[slice]) -> int:
    return max(map(length, parts), default=0)
