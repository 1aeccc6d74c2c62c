"""The parts that all modes of the head share: settings, tiles of logits, and a backend's operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.kernels.mathematics import accumulator, addmm_, merge_statistics, operand_dtype
from megatron_gvpo.kernels.supports import Supports
from megatron_gvpo.kernels.tiles import Tiles, TorchTiles

Backend = Literal["auto", "reference", "chunked", "triton", "quack"]

CHUNK_ROWS = 4096
_CPU_LOGITS, _CUDA_LOGITS = 288 << 20, 512 << 20  # bytes of one tile; a GPU needs more rows in a product


class Buffer:
    """Memory for one tile of logits, or chunk of rows, at a time."""

    def __init__(self, like: Tensor, numel: int, dtype: torch.dtype | None = None) -> None:
        """`dtype`: default: the accumulator's dtype of `like`, whose device it takes."""
        self._flat = like.new_empty(numel, dtype=accumulator(like.dtype) if dtype is None else dtype)

    def tile(self, rows: int, columns: int) -> Tensor:
        return self._flat[: rows * columns].view(rows, columns)


@dataclass(frozen=True)
class Head:
    """The settings of one call of a function of the head, for all modes."""

    first_id: int  # the token of the first row of this rank's shard of W
    columns: int  # rows of W's shard that are tokens; the padding after them is never touched
    temperature: float | Tensor  # one number for all rows, or [r] in the accumulator's dtype
    entropy: bool
    tp_group: dist.ProcessGroup | None
    logits_bytes: int  # most bytes of one tile
    stash_rows: int  # the number of first rows whose exponentials are kept for the backward
    stash_dtype: torch.dtype  # dtype of the kept exponentials, until both products are computed
    tiles: Tiles
    # The supports of all rows, as columns of this shard; None: the whole vocabulary.
    supports: Supports | None = None

    @classmethod
    def of_shard(
        cls,
        hidden_rh: Tensor,
        weight_vh: Tensor,
        *,
        temperature: float | Tensor,
        tp_group: dist.ProcessGroup | None,
        vocab_size: int | None,
        logits_bytes: int | None,
        entropy: bool = False,
        stash_bytes: int = 0,
        stash_dtype: torch.dtype | None = None,
        backend: Backend = "auto",
        supports: Supports | None = None,
    ) -> Head:
        """The head of a rank of `tp_group`, which holds the rows weight_vh of W.

        The arguments are those of `linear_logprob`. Raises ValueError for a vocabulary that W does not have,
        and for a backend that does not exist or fit.
        """
        shard, dtype = len(weight_vh), weight_vh.dtype
        first_id = shard * tp_group.rank() if tp_group is not None else 0
        if logits_bytes is None:
            logits_bytes = _CUDA_LOGITS if hidden_rh.is_cuda else _CPU_LOGITS
        if stash_dtype is None:
            stash_dtype = operand_dtype(dtype, weight_vh.device)
        if isinstance(temperature, Tensor):
            temperature = temperature.detach().to(accumulator(dtype))
        row_bytes = shard * stash_dtype.itemsize  # count the padding too: all ranks stash equally many rows
        return cls(
            first_id=first_id,
            columns=min(max(checked_vocabulary(vocab_size, weight_vh, tp_group) - first_id, 0), shard),
            temperature=temperature,
            entropy=entropy,
            tp_group=tp_group if tp_group is not None and tp_group.size() > 1 else None,
            logits_bytes=logits_bytes,
            stash_rows=min(len(hidden_rh), stash_bytes // row_bytes),
            stash_dtype=stash_dtype,
            tiles=_tiles_of(backend, weight_vh),
            supports=None if supports is None else supports.shifted(first_id),
        )

    def slices(self, total: int, across: int, itemsize: int) -> list[slice]:
        """Cut `total` into slices such that a tile, one slice by `across` numbers, fits logits_bytes."""
        step = max(1, self.logits_bytes // (itemsize * max(across, 1)))
        if step > 16:  # products are faster with aligned rows; a GPU computes 128 rows at a time
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


def checked_vocabulary(vocab_size: int | None, weight_vh: Tensor, tp_group: dist.ProcessGroup | None) -> int:
    """The entries of the whole vocabulary; default: all rows of W, the shards of tp_group together.

    Raises ValueError if W has fewer.
    """
    shard, size = len(weight_vh), 1 if tp_group is None else tp_group.size()
    if vocab_size is None:
        return shard * size
    if not 0 < vocab_size <= shard * size:
        raise ValueError(
            f"vocab_size {vocab_size}: weight_vh has {size} x {shard} rows on the ranks of tp_group; want "
            f"1 to {size * shard}"
        )
    return vocab_size


def _cut(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def length(part: slice) -> int:
    return int(part.stop - part.start)


def longest(parts: list[slice]) -> int:
    return max(map(length, parts), default=0)


def _tiles_of(backend: Backend, weight_vh: Tensor) -> Tiles:
    """Return the operations of a backend. Raises ValueError for one that does not exist or fit."""
    if backend not in ("auto", "chunked", "triton", "quack"):
        raise ValueError(f"backend {backend!r}: want 'auto', 'reference', 'chunked', 'triton' or 'quack'")
    if backend == "quack":
        return _quack_tiles(weight_vh)
    possible = weight_vh.dtype != torch.float64
    if backend == "triton":
        if not possible:
            raise ValueError("backend='triton' computes in fp32, and the inputs are fp64: use 'chunked'")
        return _triton_tiles()
    if weight_vh.is_cuda and possible and find_spec("triton") is not None:
        return _triton_tiles()
    return TorchTiles()


@cache
def _triton_tiles() -> Tiles:
    try:
        from megatron_gvpo.kernels.triton_tiles import TritonTiles
    except ImportError as error:
        raise ValueError(f"backend='triton' needs Triton, which comes with torch for CUDA: {error}") from None
    return TritonTiles()


def _quack_tiles(weight_vh: Tensor) -> Tiles:
    """Raises ValueError if QuACK, its dtype or its GPU is missing."""
    if weight_vh.dtype != torch.bfloat16:
        raise ValueError(
            f"backend='quack' computes in bf16, and the inputs are {weight_vh.dtype}: use 'auto'"
        )
    if not weight_vh.is_cuda or torch.cuda.get_device_capability(weight_vh.device) != (9, 0):
        raise ValueError("backend='quack' needs a GPU of compute capability 9.0 (Hopper): use 'auto'")
    return _quack_tiles_of_hopper()


@cache
def _quack_tiles_of_hopper() -> Tiles:
    try:
        from megatron_gvpo.kernels.quack_product import product
    except ImportError as error:
        raise ValueError(f"backend='quack' needs `pip install 'megatron-gvpo[quack]'`: {error}") from None
    from megatron_gvpo.kernels.quack_tiles import QuackTiles

    return QuackTiles(product)
