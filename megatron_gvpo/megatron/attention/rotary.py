"""Rotary position embedding of a whole pack at once, on CPU, with half of autograd's memory traffic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def angles(freqs_t: Tensor, interleaved: bool, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """megatron-core's frequencies [t, 1, 1, d] -> cosine and sine of each pair of channels [t, 1, d / 2].

    Both are multiplied by `scale`, by which YaRN scales rotated queries and keys.
    """
    half = _pairs(freqs_t.squeeze(1), freqs_t.shape[-1], interleaved)[0]
    return half.cos() * scale, half.sin() * scale


def rotate(x_tnd: Tensor, angles_t: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate the pairs of channels of x [t, n, d] by the token's angles; channels beyond them stay unchanged.

    A pair is (i, i + d / 2), or (2i, 2i + 1) if `interleaved`.
    """
    cos_t, sin_t = (angle.to(x_tnd.dtype) for angle in angles_t)
    rotated: Tensor = _Rotate.apply(x_tnd, cos_t, sin_t, interleaved)
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tnd: Tensor, cos_t: Tensor, sin_t: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos_t, sin_t)
        ctx.interleaved = interleaved
        return _rotated(x_tnd, cos_t, sin_t, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tnd: Tensor) -> tuple[Tensor | None, ...]:
        cos_t, sin_t = ctx.saved_tensors
        return _rotated(grad_tnd, cos_t, -sin_t, ctx.interleaved), None, None, None


def _rotated(x_tnd: Tensor, cos_t: Tensor, sin_t: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos_t.shape[-1]
    out_tnd = torch.empty(x_tnd.shape, dtype=x_tnd.dtype)
    out_tnd[..., width:] = x_tnd[..., width:]
    (first, second), (to_first, to_second) = (_pairs(x, width, interleaved) for x in (x_tnd, out_tnd))
    torch.mul(first, cos_t, out=to_first).addcmul_(second, sin_t, value=-1)
    torch.mul(second, cos_t, out=to_second).addcmul_(first, sin_t)
    return out_tnd


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the second channels of the pairs, as views."""
    if interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    return x[..., : width // 2], x[..., width // 2 : width]
