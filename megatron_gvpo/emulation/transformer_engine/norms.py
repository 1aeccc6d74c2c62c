"""RMSNorm and LayerNorm with their saved statistics. Source: transformer_engine/common/normalization."""

from __future__ import annotations

from typing import Any

import torch

from megatron_gvpo.emulation.transformer_engine.quantization import Rounding, write
from megatron_gvpo.emulation.transformer_engine.references import fill, read, reference, rows

Tensor = torch.Tensor


def _scale(weight: Tensor, is_zero_centered: bool) -> Tensor:
    return read(weight) + 1 if is_zero_centered else read(weight)


@reference
def rmsnorm_fwd(
    result: list[Any],
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> None:
    """out = input * rsigma * weight, where rsigma = 1 / sqrt(mean(input^2) + eps) is [rows] in fp32."""
    out, _, rsigma_n = result
    x_nh = rows(read(input))
    fill(rsigma_n, torch.rsqrt(x_nh.square().mean(1) + eps))
    normed_nh = x_nh * read(rsigma_n)[:, None] * _scale(weight, zero_centered_gamma)
    write(out, normed_nh.view(input.shape), quantizer, Rounding(input.dtype))


@reference
def rmsnorm_bwd(
    result: list[Tensor],
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> None:
    """`result`: the gradients of input and weight."""
    dx_nh, dgamma_h = _rmsnorm_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    fill(result[0], dx_nh.view(x.shape))
    fill(result[1], dgamma_h)


@reference
def rmsnorm_bwd_add(
    result: list[Tensor],
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> None:
    """`result`: the gradients of input and weight; the input's includes `add`, the residual's gradient."""
    dx_nh, dgamma_h = _rmsnorm_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    fill(result[0], dx_nh.view(x.shape) + read(add.contiguous()))
    fill(result[1], dgamma_h)


def _rmsnorm_gradients(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, is_zero_centered: bool
) -> tuple[Tensor, Tensor]:
    dz_nh, x_nh = rows(read(dz.contiguous())), rows(read(x.contiguous()))
    rsigma_n1 = read(rsigma)[:, None]
    hat_nh = x_nh * rsigma_n1
    dhat_nh = dz_nh * _scale(gamma, is_zero_centered)
    dx_nh = rsigma_n1 * (dhat_nh - hat_nh * (dhat_nh * hat_nh).mean(1, keepdim=True))
    return dx_nh, (dz_nh * hat_nh).sum(0)


@reference
def layernorm_fwd(
    result: list[Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> None:
    """out = (input - mu) * rsigma * weight + bias; mu and rsigma are [rows] fp32."""
    out, mu_n, rsigma_n = result
    x_nh = rows(read(input))
    fill(mu_n, x_nh.mean(1))
    centred_nh = x_nh - read(mu_n)[:, None]
    fill(rsigma_n, torch.rsqrt(centred_nh.square().mean(1) + eps))
    normed_nh = centred_nh * read(rsigma_n)[:, None] * _scale(weight, zero_centered_gamma)
    if bias is not None:
        normed_nh = normed_nh + read(bias)
    write(out, normed_nh.view(input.shape), quantizer, Rounding(input.dtype))


@reference
def layernorm_bwd(
    result: list[Tensor],
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> None:
    """`result`: the gradients of input, weight and bias."""
    dz_nh, x_nh = rows(read(dz.contiguous())), rows(read(x.contiguous()))
    rsigma_n1 = read(rsigma)[:, None]
    hat_nh = (x_nh - read(mu)[:, None]) * rsigma_n1
    dhat_nh = dz_nh * _scale(gamma, zero_centered_gamma)
    mean_n1 = dhat_nh.mean(1, keepdim=True)
    dx_nh = rsigma_n1 * (dhat_nh - mean_n1 - hat_nh * (dhat_nh * hat_nh).mean(1, keepdim=True))
    fill(result[0], dx_nh.view(x.shape))
    fill(result[1], (dz_nh * hat_nh).sum(0))
    fill(result[2], dz_nh.sum(0))
