"""Keeps the exponentials of softmax rows in memory, and computes both gradients from them.

With D = softmax - onehot and g_i = dL/dlogp_i, dX_i = -g_i D_i W / T_i and dW = -D^T diag(g / T) X. The
weights g need not be known when D is computed: they scale the rows of the product D W, and the rows of X
before the product with D^T. So it is enough to keep E = e^(z - k), k the row's largest logit on this rank, in
bf16 if the operands are bf16. Then

    D_ij = u_i E_ij,  u_i = e^(k_i - m_i) / S_i   (m and S: maximum and sum over the whole vocabulary)

except in the label's column, where D is 1 less. There E is replaced by expm1(logp_i) / u_i, computed in fp32,
so that nothing cancels near p = 1. Both products run over E as it is.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from megatron_gvpo.kernels.head import Buffer, Head, length, longest
from megatron_gvpo.kernels.mathematics import (
    accumulator,
    addmm_,
    empty_statistics,
    label_columns,
    logp_of,
    operand,
)
from megatron_gvpo.kernels.supports import HIDDEN

# The least u_i. Below it, this rank's shard has practically no probability in the row. Its E_ij u_i are then
# too large, but at most this, and the label's entry still fits into E's dtype.
LEAST_SCALE = 1e-15


def exponentials_(
    stash_rv: Tensor, head: Head, x_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, first: int
) -> Tensor:
    """stash_rv [rows, head.columns] <- E; returns the rows' statistics on this rank.

    `first`: the number of the head's row that x_rh and labels_r begin with.
    """
    dtype = accumulator(weight_vh.dtype)
    stats_sr = empty_statistics(labels_r, dtype, head.entropy)
    if not stash_rv.numel():
        return stats_sr
    w_vh = operand(weight_vh[: head.columns])
    if head.supports is None and not head.entropy:
        temperature = head.temperature_of(slice(first, first + len(x_rh)))
        statistics_sr = head.tiles.product_(x_rh, w_vh, labels_r, temperature, stash_rv)
        if statistics_sr is not None:
            return statistics_sr
    in_place = head.stash_dtype == dtype
    slices = head.slices(len(x_rh), head.columns, dtype.itemsize)
    buffer = Buffer(x_rh, 0 if in_place else longest(slices) * head.columns)
    for rows in slices:
        tile_rv = stash_rv[rows] if in_place else buffer.tile(length(rows), head.columns)
        of_head = slice(first + rows.start, first + rows.stop)
        z_rv = head.logits(tile_rv, x_rh[rows], w_vh, of_head)
        out_rv = z_rv if in_place else stash_rv[rows]
        stats_sr[:, rows] = head.tiles.stash_(z_rv, labels_r[rows], out_rv, head.entropy)
        if head.supports is not None:  # a row without members on this rank is e^0 = 1 everywhere
            stash_rv[rows].masked_fill_(stats_sr[0, rows, None] < HIDDEN / 2, 0)
    return stats_sr


def finish_(stash_rv: Tensor, max_r: Tensor, stats_sr: Tensor, labels_r: Tensor) -> Tensor:
    """Replace the labels' entries of E, and return u [r].

    `max_r`: the rows' largest logits on this rank; `stats_sr`: their statistics over the whole vocabulary.
    """
    u_r = ((max_r - stats_sr[0]).exp() / stats_sr[1]).clamp(min=LEAST_SCALE)
    if stash_rv.numel():
        index_r, owned_r = label_columns(stash_rv.shape[1], labels_r)
        present_r = stash_rv.gather(1, index_r[:, None])[:, 0]
        value_r = (logp_of(stats_sr).expm1() / u_r).to(stash_rv.dtype)
        stash_rv.scatter_(1, index_r[:, None], torch.where(owned_r, value_r, present_r)[:, None])
    return u_r


class RowProducts:
    """Both gradients of rows whose dL/dz is diag(scale) d, with d in memory; scale_r None: 1."""

    def __init__(self, head: Head, d_rv: Tensor, x_rh: Tensor, scale_r: Tensor | None) -> None:
        """d_rv is [r, v], for the first v rows of W; x_rh has the dtype of the products' operands."""
        self._head, self._d_rv, self._x_rh, self._scale_r = head, d_rv, x_rh, scale_r

    @cached_property
    def _scaled_rh(self) -> Tensor:
        if self._scale_r is None:
            return self._x_rh
        return torch.mul(self._x_rh, self._scale_r[:, None], out=torch.empty_like(self._x_rh))

    def write_dx(self, dx_rh: Tensor, weight_vh: Tensor) -> None:
        """Write dX a slice of rows at a time, so that only one slice is ever in fp32."""
        if not len(self._d_rv):
            return
        columns = self._d_rv.shape[1]
        w_vh, dtype = operand(weight_vh[:columns]), accumulator(weight_vh.dtype)
        across = max(w_vh.shape[1], columns if self._d_rv.dtype != w_vh.dtype else 0)
        for rows in self._head.slices(len(dx_rh), across, dtype.itemsize):
            product_rh = w_vh.new_empty(length(rows), w_vh.shape[1], dtype=dtype)
            addmm_(product_rh, operand(self._d_rv[rows], weight_vh.dtype), w_vh, beta=0)
            if self._scale_r is not None:
                product_rh.mul_(self._scale_r[rows, None])
            dx_rh[rows] = product_rh

    def add_dw(self, columns: slice, dw_vh: Tensor) -> None:
        """Add dW of these columns to dw_vh [columns, h], in the accumulator's dtype."""
        if len(self._d_rv):
            d_rv = operand(self._d_rv[:, columns], self._x_rh.dtype)
            addmm_(dw_vh, d_rv.T, self._scaled_rh)
