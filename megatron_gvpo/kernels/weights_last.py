"""The gradients of a head whose token weights are known only after the forward.

The forward keeps the exponentials of the first rows (stash.py): 6 r h v flops in all. Of the other rows it
keeps statistics, and the backward computes their logits again (8 r h v), by slices of columns: each row of W
and of dW is then read and written once for all tokens, and of dX a pass is made for every slice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gvpo.kernels.head import Buffer, Head, length, longest
from megatron_gvpo.kernels.mathematics import (
    accumulator,
    addmm_,
    empty_statistics,
    entropy_of,
    logp_of,
    merge_statistics,
    operand,
    operand_dtype,
)
from megatron_gvpo.kernels.stash import RowProducts, exponentials_, finish_
from megatron_gvpo.kernels.weight_gradient import WeightGradient


class WeightsLast(torch.autograd.Function):
    """Computes logp and entropy, differentiable in hidden_rh and weight_vh."""

    @staticmethod
    def forward(
        ctx: Any, hidden_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, head: Head
    ) -> tuple[Tensor, Tensor | None]:
        stashed, rest = slice(0, head.stash_rows), slice(head.stash_rows, len(hidden_rh))
        x_rh = operand(hidden_rh)
        stash_rv = x_rh.new_empty(head.stash_rows, head.columns, dtype=head.stash_dtype)
        stashed_sr = exponentials_(stash_rv, head, x_rh[stashed], weight_vh, labels_r[stashed], 0)
        rest_sr = _scan(head, x_rh[rest], weight_vh, labels_r[rest], rest)
        stats_sr = head.merge_over_tp(torch.cat((stashed_sr, rest_sr), 1))
        logp_r = logp_of(stats_sr)
        u_r = finish_(stash_rv, stashed_sr[0], stats_sr[:, stashed], labels_r[stashed])
        ctx.save_for_backward(hidden_rh, weight_vh, labels_r, stats_sr, stash_rv, u_r)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logp_r, entropy_of(stats_sr) if head.entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_r: Tensor | None, e_r: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_rh, weight_vh, labels_r, stats_sr, stash_rv, u_r = ctx.saved_tensors
        head: Head = ctx.head
        stashed, rest = slice(0, head.stash_rows), slice(head.stash_rows, len(hidden_rh))
        if g_r is None:
            g_r = torch.zeros_like(stats_sr[0])
        g_r = g_r / head.temperature_of(slice(None))
        stashed_rows = RowProducts(head, stash_rv, operand(hidden_rh[stashed]), -g_r[stashed] * u_r)
        x_rh = operand(hidden_rh[rest])
        recomputed = _RecomputedRows(head, x_rh, labels_r[rest], stats_sr[:, rest], g_r[rest], e_r, rest)

        dx_rh = torch.empty_like(hidden_rh) if ctx.needs_input_grad[0] else None
        rest_rh = None if dx_rh is None else dx_rh[rest].to(stats_sr.dtype).zero_()  # summed in fp32
        dw = WeightGradient(weight_vh) if ctx.needs_input_grad[1] else None
        if dx_rh is not None:
            stashed_rows.write_dx(dx_rh[stashed], weight_vh)
        for columns in _column_slices(head, hidden_rh, weight_vh, dw):
            dw_vh = None if dw is None else dw.begin(columns)
            if dw_vh is not None:
                stashed_rows.add_dw(columns, dw_vh)
            if len(x_rh):
                recomputed.add_products(columns, operand(weight_vh[columns]), rest_rh, dw_vh)
            if dw is not None and dw_vh is not None:
                dw.end(columns, dw_vh)
        if dx_rh is not None and rest_rh is not None:
            dx_rh[rest] = rest_rh  # rounds to dX's dtype; a copy onto itself if dX is fp32
        del stashed_rows, recomputed, rest_rh  # and their memory, before the result takes as much as W
        return dx_rh, None if dw is None else dw.result(), None, None


def _scan(head: Head, x_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, rows: slice) -> Tensor:
    """Return the statistics of this rank's columns; `rows`: the head's rows that x_rh holds.

    It goes by slices of columns, and so reads every row of W once, for all tokens.
    """
    dtype = accumulator(weight_vh.dtype)
    slices = head.slices(head.columns, len(x_rh), dtype.itemsize)
    buffer = Buffer(x_rh, len(x_rh) * longest(slices))
    stats_sr = empty_statistics(labels_r, dtype, head.entropy)
    for columns in slices:
        tile_rv = buffer.tile(len(x_rh), length(columns))
        z_rv = head.logits(tile_rv, x_rh, operand(weight_vh[columns]), rows, columns.start)
        piece_sr = head.tiles.statistics_(z_rv, labels_r - columns.start, head.entropy)
        stats_sr = merge_statistics(torch.stack((stats_sr, piece_sr)))
    return stats_sr


class _RecomputedRows:
    """Gradients of the rows whose logits are computed again."""

    def __init__(
        self,
        head: Head,
        x_rh: Tensor,
        labels_r: Tensor,
        stats_sr: Tensor,
        g_r: Tensor,
        e_r: Tensor | None,
        rows: slice,
    ) -> None:
        self.head, self.x_rh, self.labels_r, self.g_r, self.rows = head, x_rh, labels_r, g_r, rows
        self.buffer: Buffer | None = None
        self.max_r, sum_r = stats_sr[0], stats_sr[1]
        # dZ = e^(z - max) (offset + slope (z - max)), plus g at the label.
        self.offset_r, self.slope_r = -g_r / sum_r, None
        if e_r is not None:
            self.slope_r = -e_r[rows] / head.temperature_of(rows) / sum_r
            self.offset_r = self.offset_r + self.slope_r * (entropy_of(stats_sr) - sum_r.log())

    def add_products(self, columns: slice, w_vh: Tensor, dx_rh: Tensor | None, dw_vh: Tensor | None) -> None:
        if self.buffer is None:  # the first slice is the longest
            self.buffer = Buffer(self.x_rh, len(self.x_rh) * length(columns))
        tile_rv = self.buffer.tile(len(self.x_rh), length(columns))
        z_rv = self.head.logits(tile_rv, self.x_rh, w_vh, self.rows, columns.start)
        labels_r = self.labels_r - columns.start
        d_rv = self.head.tiles.gradient_(
            z_rv, self.max_r, self.offset_r, self.slope_r, labels_r, self.g_r, w_vh.dtype
        )
        if dx_rh is not None:
            addmm_(dx_rh, d_rv, w_vh)
        if dw_vh is not None:
            addmm_(dw_vh, d_rv.T, self.x_rh)


def _column_slices(
    head: Head, hidden_rh: Tensor, weight_vh: Tensor, dw: WeightGradient | None
) -> list[slice]:
    """Cut the vocabulary for the backward, such that the memory for one slice fits logits_bytes."""
    itemsize = accumulator(weight_vh.dtype).itemsize
    converted = head.stash_dtype != operand_dtype(weight_vh.dtype, weight_vh.device)
    numbers = [len(hidden_rh) - (0 if converted else head.stash_rows)]
    if dw is not None and not dw.in_place:
        numbers.append(hidden_rh.shape[1])
    return head.slices(head.columns, max(numbers), itemsize)
