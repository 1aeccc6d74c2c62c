"""The head's autograd functions: token weights known before the forward, or after it; and the weight's sum.

`WeightsFirst` is for token weights that are known before the forward: both gradients in one pass, 6 r h v
flops. It keeps nothing but the gradients. It needs whole softmax rows, so a tile is some tokens by all
columns.

`WeightsLast` is for token weights that are known only after the forward: it stashes exponentials or
recomputes. With D = softmax - onehot and g_i = dL/dlogp_i, dX_i = -g_i D_i W / T_i and dW = -D^T diag(g / T)
X. D does not contain the weights g: they scale rows after the first product and before the second. So the
forward stashes E = e^(z - k), k the row's largest logit on this rank, in bf16 if the operands are bf16. Then

    D_ij = u_i E_ij,  u_i = e^(k_i - m_i) / S_i   (m and S: maximum and sum over the whole vocabulary)

except in the label's column, where D is 1 less. The stash holds expm1(logp_i) / u_i there, computed in fp32,
so that nothing cancels near p = 1. Both products run over the stash as it is: 6 r h v flops in all. Rows
beyond the stash keep only their statistics, and their logits are computed again (8 r h v).
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
    label_columns,
    logp_of,
    operand,
    operand_dtype,
)
from megatron_gvpo.kernels.supports import HIDDEN
from megatron_gvpo.kernels.weight_gradient import WeightGradient, added, main_grad


class WeightsFirst(torch.autograd.Function):
    """Computes the gradients of sum(weight_r * logp_r) in the forward; the backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, weight_r: Tensor, head: Head
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        dtype = accumulator(hidden_rh.dtype)
        factors = operand_dtype(weight_vh.dtype, weight_vh.device)
        x_rh, w_vh = operand(hidden_rh), operand(weight_vh[: head.columns])
        # Count the padding too: all ranks need the same number of slices, because each has an exchange.
        slices = head.slices(len(hidden_rh), len(weight_vh), dtype.itemsize)
        buffer = Buffer(hidden_rh, longest(slices) * head.columns)
        dx_rh = torch.zeros_like(hidden_rh, dtype=dtype) if ctx.needs_input_grad[0] else None
        dw_vh = torch.zeros_like(weight_vh, dtype=dtype) if ctx.needs_input_grad[1] else None
        stats_sr = empty_statistics(labels_r, dtype, head.entropy)
        for rows in slices:
            z_rv = head.logits(buffer.tile(length(rows), head.columns), x_rh[rows], w_vh, rows, 0)
            piece_sr = head.tiles.statistics_(z_rv, labels_r[rows], head.entropy)
            stats_sr[:, rows] = merged_sr = head.merge_over_tp(piece_sr)
            g_r = weight_r[rows].to(dtype) / head.temperature_of(rows)
            d_rv = head.tiles.weights_first_gradient_(z_rv, piece_sr, merged_sr, labels_r[rows], g_r, factors)
            if dx_rh is not None:
                addmm_(dx_rh[rows], d_rv, w_vh, beta=0)
            if dw_vh is not None:
                addmm_(dw_vh[: head.columns], d_rv.T, x_rh[rows])
        ctx.gradients, ctx.dtype, ctx.weight_vh = (dx_rh, dw_vh), hidden_rh.dtype, weight_vh
        logp_r = logp_of(stats_sr)
        entropy_r = entropy_of(stats_sr) if head.entropy else None
        ctx.mark_non_differentiable(*[logp_r, entropy_r][: 1 + head.entropy])
        return logp_r, entropy_r, (weight_r * logp_r).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _logp: None, _entropy: None, g: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_gradients(ctx, g, "linear_logprob"), None, None, None


def scaled_gradients(ctx: Any, g: Tensor, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return g times the gradients (dX, dW) that the forward of `name` left in ctx, which gives them up."""
    if ctx.gradients is None:
        raise RuntimeError(f"the surrogate of {name} backpropagates once: its gradients are spent")
    dx_rh, dw_vh = ctx.gradients
    ctx.gradients = None
    dx_rh = None if dx_rh is None else dx_rh.mul_(g).to(ctx.dtype)
    if dw_vh is None:
        return dx_rh, None
    main_vh = main_grad(ctx.weight_vh)
    if main_vh is None:
        return dx_rh, dw_vh.mul_(g).to(ctx.dtype)
    main_vh.addcmul_(dw_vh, g.to(main_vh.dtype))
    del dw_vh
    return dx_rh, added(ctx.weight_vh)


# The least u_i. Below it, this rank's shard has practically no probability in the row. Its stashed p_ij are
# then too large, but at most this, and the label's entry still fits into the stash's dtype.
LEAST_SCALE = 1e-15


class WeightsLast(torch.autograd.Function):
    """Computes logp and entropy, differentiable in hidden_rh and weight_vh."""

    @staticmethod
    def forward(
        ctx: Any, hidden_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, head: Head
    ) -> tuple[Tensor, Tensor | None]:
        stashed, rest = slice(0, head.stash_rows), slice(head.stash_rows, len(hidden_rh))
        x_rh = operand(hidden_rh)
        stash_rv, stashed_sr = _stash(head, x_rh[stashed], weight_vh, labels_r[stashed])
        rest_sr = head.tiles.scan(head, x_rh[rest], weight_vh, labels_r[rest], rest)
        stats_sr = head.merge_over_tp(torch.cat((stashed_sr, rest_sr), 1))
        logp_r = logp_of(stats_sr)
        u_r = _stash_scale(stashed_sr[0], stats_sr[:, stashed])
        _put_at_labels_(stash_rv, labels_r[stashed], logp_r[stashed].expm1() / u_r)
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
        stashed_rows = _StashedRows(head, stash_rv, operand(hidden_rh[stashed]), -g_r[stashed] * u_r)
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
        return dx_rh, None if dw is None else dw.result(), None, None


def _stash(head: Head, x_rh: Tensor, weight_vh: Tensor, labels_r: Tensor) -> tuple[Tensor, Tensor]:
    """Return (E [rows, columns], the rows' statistics on this rank)."""
    dtype = accumulator(weight_vh.dtype)
    stash_rv = x_rh.new_empty(len(x_rh), head.columns, dtype=head.stash_dtype)
    stats_sr = empty_statistics(labels_r, dtype, head.entropy)
    if not stash_rv.numel():
        return stash_rv, stats_sr
    in_place = head.stash_dtype == dtype
    w_vh = operand(weight_vh[: head.columns])
    slices = head.slices(len(x_rh), head.columns, dtype.itemsize)
    buffer = Buffer(x_rh, 0 if in_place else longest(slices) * head.columns)
    for rows in slices:
        tile_rv = stash_rv[rows] if in_place else buffer.tile(length(rows), head.columns)
        z_rv = head.logits(tile_rv, x_rh[rows], w_vh, rows, 0)
        stats_sr[:, rows] = head.tiles.stash_(z_rv, labels_r[rows], stash_rv[rows])
        if head.supports is not None:  # a row without members on this rank is e^0 = 1 everywhere
            stash_rv[rows].masked_fill_(stats_sr[0, rows, None] < HIDDEN / 2, 0)
    return stash_rv, stats_sr


def _stash_scale(max_r: Tensor, stats_sr: Tensor) -> Tensor:
    """Return u [r] of rows whose largest logit on this rank is max_r."""
    return ((max_r - stats_sr[0]).exp() / stats_sr[1]).clamp(min=LEAST_SCALE)


def _put_at_labels_(stash_rv: Tensor, labels_r: Tensor, value_r: Tensor) -> None:
    if stash_rv.numel():
        index_r, owned_r = label_columns(stash_rv.shape[1], labels_r)
        present_r = stash_rv.gather(1, index_r[:, None])[:, 0]
        value_r = torch.where(owned_r, value_r.to(stash_rv.dtype), present_r)
        stash_rv.scatter_(1, index_r[:, None], value_r[:, None])


class _StashedRows:
    """Gradients of the rows whose exponentials were stashed."""

    def __init__(self, head: Head, stash_rv: Tensor, x_rh: Tensor, scale_r: Tensor) -> None:
        self.head, self.stash_rv, self.scale_r = head, stash_rv, scale_r
        self.scaled_rh = torch.mul(x_rh, scale_r[:, None], out=torch.empty_like(x_rh))

    def write_dx(self, dx_rh: Tensor, weight_vh: Tensor) -> None:
        """Write dX a slice of rows at a time, so that only one slice is ever in fp32."""
        if not len(self.stash_rv):
            return
        w_vh = operand(weight_vh[: self.head.columns])
        across = max(w_vh.shape[1], self.head.columns if self.stash_rv.dtype != w_vh.dtype else 0)
        for rows in self.head.slices(len(dx_rh), across, self.scale_r.itemsize):
            product_rh = self.scale_r.new_empty(length(rows), w_vh.shape[1])
            addmm_(product_rh, operand(self.stash_rv[rows], weight_vh.dtype), w_vh, beta=0)
            dx_rh[rows] = product_rh.mul_(self.scale_r[rows, None])

    def add_dw(self, columns: slice, dw_vh: Tensor) -> None:
        if len(self.stash_rv):
            addmm_(dw_vh, operand(self.stash_rv[:, columns], self.scaled_rh.dtype).T, self.scaled_rh)


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
        d_rv = self.head.tiles.weights_last_gradient_(
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
