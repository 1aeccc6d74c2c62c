"""The gradients of a head whose token weights are known before the forward: both in one pass, 6 r h v flops.

A chunk of rows at a time: its exponentials (stash.py), then dX and dW of the chunk. Nothing but the gradients
is kept. Each chunk's dW product reads and writes all of dW, so that a chunk has many rows.
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
    empty_statistics,
    entropy_of,
    logp_of,
    operand,
)
from megatron_gvpo.kernels.stash import RowProducts, exponentials_, finish_
from megatron_gvpo.kernels.weight_gradient import added, main_grad

_TOLERANCE = 1e-4  # relative: the schedule multiplies and divides the loss in fp32


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

        Raises RuntimeError if they are spent, or if g is not the upstream gradient that was announced (on a
        GPU asynchronously).
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
