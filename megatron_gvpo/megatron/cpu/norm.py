"""RMSNorm for layer specs without Transformer Engine, with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class LocalRMSNorm(torch.nn.Module):
    """RMSNorm computed in fp32, with the interface of megatron-core's norm modules.

    megatron-core's own torch norm refuses sequence parallelism. This one marks its weight, so that
    `finalize_model_grads` sums the weight's gradient over the tensor-parallel group. With
    `layernorm_zero_centered_gamma` the factor is 1 + weight.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, float(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype) - self.offset)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        factor_h = self.weight.float() + self.offset if self.offset else self.weight.float()
        normed: Tensor = _RMSNorm.apply(x.float(), factor_h, self.eps)
        return normed.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """x [..., h], weight [h], both fp32 -> x / rms(x) * weight, with half of autograd's memory traffic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_h: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight_h)
        return unit * weight_h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight_h = ctx.saved_tensors
        product = grad * unit
        along_unit = (product @ weight_h).unsqueeze(-1).div_(-weight_h.shape[0])
        grad_x = (grad * weight_h).addcmul_(unit, along_unit).mul_(scale)
        return grad_x, product.flatten(0, -2).sum(0), None
