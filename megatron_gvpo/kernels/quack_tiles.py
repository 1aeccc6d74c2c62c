"""The stash by QuACK's product, on Hopper: exponentials without logits (quack_product.py).

The product gives every row one offset for each tile of columns. A Triton kernel then gives a row one offset,
the largest: it multiplies by powers of two, which rounds nothing. From there on the stash is that of all
backends, so that weights may come with the backward, and shards of the vocabulary merge their statistics
before the products of the gradients.

Rows that are not stashed, entropies and supports need the logits: there these are Triton's tiles.
"""

# ruff: noqa: N803 - constants are in capitals, as in Triton's own kernels
# mypy: disallow-untyped-defs=False, check-untyped-defs=False
from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_gvpo.kernels.triton_tiles import TritonTiles

Product = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]

STEP = 64  # columns: a shard must be a multiple of it
_TILES = (192, 128, 64)  # columns of a tile of the product, the fastest first; larger ones spill registers
_ROWS = 4096  # of one product; a tile has two numbers a row beside E
_LN2 = math.log(2)
# The kernel's log2(e) is fp32. It computes e^(z (1 - DRIFT)), and the label's logit is z itself.
_DRIFT = 1 - float(torch.tensor(1 / _LN2, dtype=torch.float32)) * _LN2


@triton.jit
def rescale_kernel(
    e, offsets, largest, columns, tiles, e_stride,
    TILE: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """e <- e 2^(offset of its tile - largest offset of its row), for some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1) * STEPS + tl.arange(0, STEPS)
    column = step[:, None] * STEP + tl.arange(0, STEP)[None, :]
    inside = column < columns
    shift = tl.load(offsets + row * tiles + (step * STEP) // TILE, mask=step * STEP < columns, other=0.0)
    factor = tl.exp2(shift - tl.load(largest + row))
    pointers = e + row * e_stride + column
    value = tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
    tl.store(pointers, value.to(e.dtype.element_ty), mask=inside)


class QuackTiles(TritonTiles):
    """Triton's tiles, and exponentials by a product that writes no logits."""

    def __init__(self, product: Product) -> None:
        self._product = product

    def product_(
        self, x_rh: Tensor, w_vh: Tensor, labels_r: Tensor, temperature: float | Tensor, out_rv: Tensor
    ) -> Tensor:
        tile = tile_columns(len(w_vh))
        if isinstance(temperature, Tensor):
            inverse_r = temperature.reciprocal()
        else:
            inverse_r = torch.full_like(labels_r, 1 / temperature, dtype=torch.float32)
        stats_sr = inverse_r.new_empty(3, len(x_rh))
        for start in range(0, len(x_rh), _ROWS):
            rows = slice(start, start + _ROWS)
            e_rv = out_rv[rows]
            offset_rt, sum_rt, target_r = self._product(
                x_rh[rows], w_vh, labels_r[rows], inverse_r[rows], e_rv, tile
            )
            offset_r = offset_rt.amax(1)
            sum_r = (sum_rt * (offset_rt - offset_r[:, None]).exp2()).sum(1)
            stats_sr[:, rows] = _statistics(offset_r, sum_r, target_r)
            grid = (len(e_rv), triton.cdiv(len(w_vh) // STEP, 32))
            rescale_kernel[grid](
                e_rv, offset_rt, offset_r, len(w_vh), offset_rt.shape[1], e_rv.stride(0),
                TILE=tile, STEP=STEP, STEPS=32, num_warps=8,
            )  # fmt: skip
        return stats_sr


def tile_columns(columns: int) -> int:
    """Return the columns of a tile of the product. Raises ValueError if no tile divides the vocabulary."""
    for tile in _TILES:
        if columns % tile == 0:
            return tile
    raise ValueError(
        f"backend='quack' needs a multiple of {STEP} tokens on each rank, and one has {columns}: use 'auto'"
    )


def _statistics(offset_r: Tensor, sum_r: Tensor, target_r: Tensor) -> Tensor:
    """Return the statistics of mathematics.py from those of powers of two.

    The offset in nats, k ln 2, is not an fp32 number, and near p = 1 its rounding would be as large as log p.
    The sum is relative to the rounded offset, so that it takes up the difference.
    """
    exact_r = offset_r.double() * _LN2
    largest_r = exact_r.float()
    label_r = torch.where(target_r.isfinite(), target_r, 0).double()
    correction_r = (exact_r - largest_r + label_r * _DRIFT).exp()
    return torch.stack((largest_r, (sum_r * correction_r).float(), target_r))
