"""The gradients of a head, as autograd functions: of the hidden states, and of the output layer's weight.

Where the token weights are known before the forward (`WeightsFirst`), one pass computes both, with 6 r h v
flops. It computes the exponentials of a chunk of rows (stash.py), then dX and dW of the chunk. Only the
gradients are kept. Each chunk's dW product reads and writes all of dW, so that a chunk has many rows.

Where they are known only after it (`WeightsLast`), the forward keeps the exponentials of the first rows: 6 r
h v flops in all. Of the other rows it keeps statistics, and the backward computes their logits again (8 r h
v), by slices of columns: each row of W and of dW is then read and written once for all tokens, and dX once
for every slice.

The weight's gradient is added to Megatron's fp32 gradient buffer, if the weight has one. Megatron's data
parallelism gives every parameter `main_grad`, a view of the buffer that it reduces, and a hook that adds
`.grad` to it. A layer that adds to `main_grad` itself sets `grad_added_to_main_grad`. It must still return a
tensor, because the hook runs only then. If `zero_out_wgrad` is set, the weight has a second use on this stage
(tied embeddings): the hook runs with that gradient, and adds it, so that this one returns none.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def main_grad(weight_vh: Tensor) -> Tensor | None:
    """Return Megatron's buffer of this weight's gradient, in the accumulator's dtype, or None."""
    main_vh = getattr(weight_vh, "main_grad", None)  # Megatron sets these attributes; a plain weight has none
    if not isinstance(main_vh, Tensor) or not hasattr(weight_vh, "grad_added_to_main_grad"):
        return None
    return main_vh if main_vh.dtype == accumulator(weight_vh.dtype) else None


def added(weight_vh: Tensor) -> Tensor | None:
    """Return the autograd function's result for a weight whose gradient is already in `main_grad`."""
    weight_vh.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None if getattr(weight_vh, "zero_out_wgrad", False) else torch.empty_like(weight_vh)


class WeightGradient:
    """Sums dW in one backward, a slice of W's rows (the logits' columns) at a time, and each slice once."""

    def __init__(self, weight_vh: Tensor) -> None:
        self._weight_vh = weight_vh
        self._main_vh = main_grad(weight_vh)
        self._own_vh = torch.zeros_like(weight_vh) if self._main_vh is None else None
        self._scratch_ch: Tensor | None = None
        # True if the sums are added to main_grad and need no further memory.
        self.in_place = self._main_vh is not None

    def begin(self, columns: slice) -> Tensor:
        """Return [c, h] in the accumulator's dtype: the caller adds the products of these rows to it."""
        if self._main_vh is not None:
            return self._main_vh[columns]
        rows, width = columns.stop - columns.start, self._weight_vh.shape[1]
        if self._scratch_ch is None or len(self._scratch_ch) < rows:
            dtype = accumulator(self._weight_vh.dtype)
            self._scratch_ch = self._weight_vh.new_empty(rows, width, dtype=dtype)
        return self._scratch_ch[:rows].zero_()

    def end(self, columns: slice, dw_ch: Tensor) -> None:
        """Finish the rows of `begin`. Without Megatron's buffer, their sum is rounded here, once."""
        if self._own_vh is not None:
            self._own_vh[columns] = dw_ch

    def result(self) -> Tensor | None:
        """Return the autograd function's result for the weight."""
        return added(self._weight_vh) if self._own_vh is None else self._own_vh


_TOLERANCE = 1e-4  # relative, because the schedule multiplies and divides the loss in fp32


class KnownGradients:
    """dX and dW that a forward computes, and its backward returns.

    `upstream` is the gradient that will arrive in the backward. If it is known, the sums are the gradients
    themselves, and dW is added to Megatron's `main_grad` at once, if the weight has one. If it is None, the
    sums wait in the accumulator's dtype, and the backward scales them.
    """

    def __init__(
        self, hidden_rh: Tensor, weight_vh: Tensor, wanted: Sequence[bool], upstream: float | None
    ) -> None:
        """`wanted`: whether hidden_rh and weight_vh need a gradient."""
        dtype = accumulator(hidden_rh.dtype)
        self.factor = 1.0 if upstream is None else upstream  # the caller multiplies the token weights by it
        self._upstream, self._weight_vh, self._dtype = upstream, weight_vh, hidden_rh.dtype
        self._dx_rh = self._dw_vh = None
        self._in_main_grad = False
        if wanted[0]:
            self._dx_rh = torch.empty_like(hidden_rh, dtype=dtype if upstream is None else hidden_rh.dtype)
        if wanted[1]:
            self._dw_vh = None if upstream is None else main_grad(weight_vh)
            self._in_main_grad = self._dw_vh is not None
            if self._dw_vh is None:
                self._dw_vh = torch.zeros_like(weight_vh, dtype=dtype)

    @property
    def are_wanted(self) -> bool:
        return self._dx_rh is not None or self._dw_vh is not None

    def add(self, rows: slice, columns: int, products: RowProducts, weight_vh: Tensor) -> None:
        """Add a chunk's gradients: dX of `rows`, which belong to it alone, and dW of the first `columns`.

        `weight_vh`: the weight, in the dtype of the products' operands.
        """
        if self._dx_rh is not None:
            products.write_dx(self._dx_rh[rows], weight_vh)
        if self._dw_vh is not None:
            products.add_dw(slice(0, columns), self._dw_vh[:columns])

    def take(self, g: Tensor, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Return (dX, dW) of the function `name`, whose upstream gradient is g, and give them up.

        Raises RuntimeError if they were taken before, or (on a GPU asynchronously) if g is not `upstream`.
        """
        if not self.are_wanted:
            raise RuntimeError(f"the surrogate of {name} backpropagates once: its gradients are spent")
        dx_rh, dw_vh, in_main_grad = self._dx_rh, self._dw_vh, self._in_main_grad
        self._dx_rh = self._dw_vh = None
        if self._upstream is not None:
            torch._assert_async(
                (g - self._upstream).abs() <= _TOLERANCE * abs(self._upstream),
                f"{name} was told that its surrogate's gradient would be {self._upstream}: another arrived",
            )
            if in_main_grad:
                return dx_rh, added(self._weight_vh)
            return dx_rh, None if dw_vh is None else dw_vh.to(self._dtype)
        dx_rh = None if dx_rh is None else dx_rh.mul_(g).to(self._dtype)
        main_vh = None if dw_vh is None else main_grad(self._weight_vh)
        if dw_vh is None or main_vh is None:
            return dx_rh, None if dw_vh is None else dw_vh.mul_(g).to(self._dtype)
        main_vh.addcmul_(dw_vh, g.to(main_vh.dtype))
        return dx_rh, added(self._weight_vh)


class WeightsFirst(torch.autograd.Function):
    """Computes the gradients of sum(weight_r * logp_r) in the forward; the backward returns them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_rh: Tensor,
        weight_vh: Tensor,
        labels_r: Tensor,
        weight_r: Tensor,
        head: Head,
        upstream: float | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        dtype = accumulator(hidden_rh.dtype)
        w_vh = operand(weight_vh[: head.columns])
        gradients = KnownGradients(hidden_rh, weight_vh, ctx.needs_input_grad, upstream)
        # Count the padding too: all ranks need the same number of chunks, because each has an exchange.
        chunks = head.chunks(len(hidden_rh), len(weight_vh), dtype)
        buffer = Buffer(hidden_rh, longest(chunks) * head.columns, head.stash_dtype)
        stats_sr = empty_statistics(labels_r, dtype, head.entropy)
        for rows in chunks:
            x_rh, stash_rv = operand(hidden_rh[rows]), buffer.tile(length(rows), head.columns)
            piece_sr = exponentials_(stash_rv, head, x_rh, w_vh, labels_r[rows], rows.start)
            stats_sr[:, rows] = merged_sr = head.merge_over_tp(piece_sr)
            u_r = finish_(stash_rv, piece_sr[0], merged_sr, labels_r[rows])
            scale_r = weight_r[rows].to(dtype) * (-gradients.factor / head.temperature_of(rows)) * u_r
            gradients.add(rows, head.columns, RowProducts(head, stash_rv, x_rh, scale_r), w_vh)
        ctx.gradients = gradients
        logp_r = logp_of(stats_sr)
        entropy_r = entropy_of(stats_sr) if head.entropy else None
        ctx.mark_non_differentiable(*[logp_r, entropy_r][: 1 + head.entropy])
        return logp_r, entropy_r, (weight_r * logp_r).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _logp: None, _entropy: None, g: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.gradients.take(g, "linear_logprob"), None, None, None, None


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
        # Free their memory first, because the result takes as much as W.
        del stashed_rows, recomputed, rest_rh
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
    """Computes the gradients of the rows whose logits are computed again."""

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
        if self.buffer is None:  # the first slice is the longest, so its buffer serves all
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
