"""The head for token weights that are known before the forward: both gradients in one pass, 6 r h v flops.

It keeps nothing but the gradients. It needs whole softmax rows, so a tile is some tokens by all columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gvpo.kernels import softmax
from megatron_gvpo.kernels.head import Buffer, Head, length, longest
from megatron_gvpo.kernels.products import accumulator, addmm_, operand, operand_dtype
from megatron_gvpo.kernels.weight_gradient import added, main_grad


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
        stats_sr = softmax.no_columns(labels_r, dtype, head.entropy)
        for rows in slices:
            z_rv = head.logits(buffer.tile(length(rows), head.columns), x_rh[rows], w_vh, rows)
            piece_sr = head.tiles.statistics_(z_rv, labels_r[rows], head.entropy)
            stats_sr[:, rows] = merged_sr = head.merge_over_tp(piece_sr)
            g_r = weight_r[rows].to(dtype) / head.temperature_of(rows)
            d_rv = head.tiles.weights_first_gradient_(z_rv, piece_sr, merged_sr, labels_r[rows], g_r, factors)
            if dx_rh is not None:
                addmm_(dx_rh[rows], d_rv, w_vh, beta=0)
            if dw_vh is not None:
                addmm_(dw_vh[: head.columns], d_rv.T, x_rh[rows])
        ctx.gradients, ctx.dtype, ctx.weight_vh = (dx_rh, dw_vh), hidden_rh.dtype, weight_vh
        logp_r = softmax.logp(stats_sr)
        entropy_r = softmax.entropy(stats_sr) if head.entropy else None
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
