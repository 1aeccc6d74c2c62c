"""The tile operations in Triton: one pass over a tile where PyTorch needs five, and a forward without tiles.

A product writes a tile to memory in fp32. The work after it is bound by memory traffic. So one pass reads a
row's statistics (the online softmax), and another writes the gradient in the next product's dtype.
`scan_kernel` computes the product itself, block by block, and keeps only the statistics.

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

from megatron_gvpo.kernels.head import Head, Tiles
from megatron_gvpo.kernels.mathematics import empty_statistics, merge_statistics, operand


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


@triton.jit
def scan_kernel(
    x, w, labels, temperature, stats, rows, hidden, columns, per_split, splits, x_stride, w_stride,
    ENTROPY: tl.constexpr, PER_ROW: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HIDDEN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the statistics [split, s, row] of x w^T / temperature for a block of rows and a split.

    Programs that run at the same time share GROUP blocks of rows of x, and the splits of w, in the L2 cache.
    """
    blocks = tl.cdiv(rows, ROWS)
    first = tl.program_id(0) // (GROUP * splits) * GROUP
    group = tl.minimum(blocks - first, GROUP)
    within = tl.program_id(0) % (GROUP * splits)
    split = within // group
    row = (first + within % group) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    x += row[:, None].to(tl.int64) * x_stride
    label = tl.load(labels + row, mask=valid, other=-1)
    if PER_ROW:
        scale = 1 / tl.load(temperature + row, mask=valid, other=1.0)[:, None]
    else:
        scale = 1 / tl.load(temperature)
    largest = tl.full((ROWS,), LEAST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    target = tl.full((ROWS,), float("-inf"), tl.float32)
    depth = tl.arange(0, HIDDEN)
    end = tl.minimum((split + 1) * per_split, columns)
    for start in range(split * per_split, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < end
        w_block = w + column[None, :].to(tl.int64) * w_stride
        logits = tl.zeros((ROWS, COLUMNS), tl.float32)
        for h in range(0, hidden, HIDDEN):
            deep = h + depth < hidden
            a = tl.load(x + (h + depth)[None, :], mask=valid[:, None] & deep[None, :], other=0.0)
            b = tl.load(w_block + (h + depth)[:, None], mask=inside[None, :] & deep[:, None], other=0.0)
            logits = tl.dot(a, b, logits, input_precision="ieee")
        logits = tl.where(inside[None, :], logits * scale, float("-inf"))
        new = tl.maximum(largest, tl.max(logits, 1))
        shifted = logits - new[:, None]
        power = tl.exp(shifted)
        shrink = tl.exp(largest - new)
        if ENTROPY:
            moment = shrink * (moment + (largest - new) * total)
            moment += tl.sum(tl.where(inside[None, :], shifted, 0.0) * power, 1)
        total = shrink * total + tl.sum(power, 1)
        largest = new
        is_label = (column[None, :] == label[:, None]) & inside[None, :]
        target = tl.maximum(target, tl.max(tl.where(is_label, logits, float("-inf")), 1))
    stats += split.to(tl.int64) * (3 + ENTROPY) * rows + row
    tl.store(stats, largest, mask=valid)
    tl.store(stats + rows, total, mask=valid)
    tl.store(stats + 2 * rows, target, mask=valid)
    if ENTROPY:
        tl.store(stats + 3 * rows, moment, mask=valid)


LEAST = torch.finfo(torch.float32).min
ROW_BLOCK = 4096  # columns that one program holds in registers
SPLITS = 8  # least number of splits of the vocabulary
PROGRAMS = 528  # least number of programs, to keep a GPU with 132 multiprocessors busy


class TritonTiles(Tiles):
    """Tiles in Triton; `fused`: one kernel computes the forward's product and statistics, without logits."""

    def __init__(self, fused: bool) -> None:
        self._fused = fused

    def statistics_(self, z_rv: Tensor, labels_r: Tensor, entropy: bool) -> Tensor:
        """Leaves z_rv unchanged."""
        return self._rows(z_rv, labels_r, entropy, None)

    def stash_(self, z_rv: Tensor, labels_r: Tensor, out_rv: Tensor) -> Tensor:
        return self._rows(z_rv, labels_r, False, out_rv)

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

    def weights_first_gradient_(
        self,
        z_rv: Tensor,
        piece_sr: Tensor,
        merged_sr: Tensor,
        labels_r: Tensor,
        g_r: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        return self.weights_last_gradient_(
            z_rv, merged_sr[0], -g_r / merged_sr[1], None, labels_r, g_r, dtype
        )

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

    def scan(self, head: Head, x_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, rows: slice) -> Tensor:
        if not self._fused or head.supports is not None or not len(x_rh) or not head.columns:
            return super().scan(head, x_rh, weight_vh, labels_r, rows)
        _check(x_rh)
        w_vh = operand(weight_vh)  # x_rh is converted already; on a CPU, Triton has no bf16 product
        tile = scan_tile(weight_vh.dtype, len(x_rh), head.columns, x_rh.shape[1])
        blocks = triton.cdiv(len(x_rh), tile["ROWS"])
        tiles = triton.cdiv(head.columns, tile["COLUMNS"])
        splits = min(tiles, max(SPLITS, triton.cdiv(PROGRAMS, blocks)))
        per_split = triton.cdiv(tiles, splits) * tile["COLUMNS"]
        splits = triton.cdiv(head.columns, per_split)  # every split has columns
        temperature = head.temperature_of(rows)
        stats_ksr = x_rh.new_empty(splits, 3 + head.entropy, len(x_rh), dtype=torch.float32)
        scan_kernel[(blocks * splits,)](
            x_rh, w_vh, labels_r,
            torch.as_tensor(temperature, dtype=torch.float32, device=x_rh.device).contiguous(), stats_ksr,
            len(x_rh), x_rh.shape[1], head.columns, per_split, splits, x_rh.stride(0), w_vh.stride(0),
            ENTROPY=head.entropy, PER_ROW=isinstance(temperature, Tensor), LEAST=LEAST, **tile,
        )  # fmt: skip
        return merge_statistics(stats_ksr)


def scan_tile(dtype: torch.dtype, rows: int, columns: int, hidden: int) -> dict[str, int]:
    """Return `scan_kernel`'s block sizes: the largest whose registers do not spill on Hopper."""
    bf16 = dtype == torch.bfloat16
    most = {"ROWS": 128, "COLUMNS": 128, "HIDDEN": 64} if bf16 else {"ROWS": 64, "COLUMNS": 64, "HIDDEN": 32}
    size = {"ROWS": rows, "COLUMNS": columns, "HIDDEN": hidden}
    tile = {name: max(16, min(most[name], triton.next_power_of_2(size[name]))) for name in most}
    return tile | {"GROUP": 16, "num_warps": 8, "num_stages": 4}


def _check(x: Tensor) -> None:
    if not x.is_cuda and isinstance(row_kernel, triton.JITFunction):
        raise ValueError(
            "backend='triton' on a CPU needs TRITON_INTERPRET=1 in the environment when Python starts (slow, "
            "for tests): use 'chunked'"
        )
