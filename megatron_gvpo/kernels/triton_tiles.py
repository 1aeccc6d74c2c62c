"""The tile operations in Triton: one or two passes over a tile where PyTorch needs five.

A product writes a tile to memory in fp32. The work after it is bound by memory traffic. So one pass reads a
row's statistics (the online softmax), and another writes exponentials or the gradient in the next product's
dtype.

The kernels use no atomics: equal inputs give equal bits. Addresses are 64-bit. Columns beyond the tile are
masked before use. A label is looked up by its own address, never by comparison with columns that may be
padding. The kernels run on a CPU if TRITON_INTERPRET=1 is set before this module is imported.
"""

# ruff: noqa: N803 - constants are in capitals, as in Triton's own kernels
# mypy: disallow-untyped-defs=False, check-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_gvpo.kernels.mathematics import empty_statistics
from megatron_gvpo.kernels.tiles import Tiles


@triton.jit
def row_kernel(
    z, labels, stats, out, columns, z_stride, out_stride, rows,
    ENTROPY: tl.constexpr, STASH: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one row of z; with STASH also out <- e^(z - its maximum)."""
    row = tl.program_id(0).to(tl.int64)
    z += row * z_stride
    column = tl.arange(0, BLOCK)
    largest = tl.full((), LEAST, tl.float32)
    total = tl.zeros((), tl.float32)
    moment = tl.zeros((), tl.float32)  # sum of (z - largest) e^(z - largest)
    for start in range(0, columns, BLOCK):
        inside = start + column < columns
        value = tl.load(z + start + column, mask=inside, other=float("-inf"))
        new = tl.maximum(largest, tl.max(value, 0))
        shifted = value - new
        power = tl.exp(shifted)
        shrink = tl.exp(largest - new)
        if ENTROPY:
            moment = shrink * (moment + (largest - new) * total)
            moment += tl.sum(tl.where(inside, shifted, 0.0) * power, 0)
        total = shrink * total + tl.sum(power, 0)
        largest = new
    label = tl.load(labels + row)
    owned = (label >= 0) & (label < columns)
    target = tl.load(z + label, mask=owned, other=float("-inf"))
    tl.store(stats + row, largest)
    tl.store(stats + rows + row, total)
    tl.store(stats + 2 * rows + row, target)
    if ENTROPY:
        tl.store(stats + 3 * rows + row, moment)
    if STASH:
        out += row * out_stride
        for start in range(0, columns, BLOCK):
            inside = start + column < columns
            value = tl.load(z + start + column, mask=inside, other=0.0)
            tl.store(out + start + column, tl.exp(value - largest).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    z, shift, offset, slope, labels, g, out, columns, z_stride, out_stride,
    SLOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out <- e^(z - shift) (offset + slope (z - shift)) + 1[label] g, for a block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    shifted = tl.load(z + row * z_stride + column, mask=inside, other=0.0) - tl.load(shift + row)
    factor = tl.load(offset + row)
    if SLOPE:
        factor += tl.load(slope + row) * shifted
    gradient = tl.exp(shifted) * factor
    gradient += tl.where(column == tl.load(labels + row), tl.load(g + row), 0.0)
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=inside)


LEAST = torch.finfo(torch.float32).min
ROW_BLOCK = 4096  # columns that one program holds in registers


class TritonTiles(Tiles):
    """Tiles in Triton."""

    def statistics_(self, z_rv: Tensor, labels_r: Tensor, entropy: bool) -> Tensor:
        return self._rows(z_rv, labels_r, entropy, None)

    def stash_(self, z_rv: Tensor, labels_r: Tensor, out_rv: Tensor, entropy: bool) -> Tensor:
        return self._rows(z_rv, labels_r, entropy, out_rv)

    def _rows(self, z_rv: Tensor, labels_r: Tensor, entropy: bool, out_rv: Tensor | None) -> Tensor:
        rows, columns = z_rv.shape
        if not z_rv.numel():
            return empty_statistics(labels_r, z_rv.dtype, entropy)
        _check(z_rv)
        stats_sr = z_rv.new_empty(3 + entropy, rows)
        out = z_rv if out_rv is None else out_rv
        block = min(ROW_BLOCK, triton.next_power_of_2(columns))
        row_kernel[(rows,)](
            z_rv, labels_r, stats_sr, out, columns, z_rv.stride(0), out.stride(0), rows,
            ENTROPY=entropy, STASH=out_rv is not None, LEAST=LEAST, BLOCK=block, num_warps=8,
        )  # fmt: skip
        return stats_sr

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
        rows, columns = z_rv.shape
        out_rv = z_rv if z_rv.dtype == dtype else z_rv.new_empty(rows, columns, dtype=dtype)
        if not z_rv.numel():
            return out_rv
        _check(z_rv)
        block = min(ROW_BLOCK, triton.next_power_of_2(columns))
        gradient_kernel[(rows, triton.cdiv(columns, block))](
            z_rv, max_r.contiguous(), offset_r.contiguous(), offset_r if slope_r is None else slope_r,
            labels_r, g_r.contiguous(), out_rv, columns, z_rv.stride(0), out_rv.stride(0),
            SLOPE=slope_r is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip
        return out_rv


def _check(x: Tensor) -> None:
    if not x.is_cuda and isinstance(row_kernel, triton.JITFunction):
        raise ValueError(
            "backend='triton' on a CPU needs TRITON_INTERPRET=1 in the environment when Python starts (slow, "
            "for tests): use 'chunked'"
        )
