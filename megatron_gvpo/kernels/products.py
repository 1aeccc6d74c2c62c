"""Matrix products: operands in the parameters' dtype on CUDA (tensor cores), results always in fp32.

A CPU has no bf16 product with an fp32 result, so there the operands are converted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products of operands of `dtype` are summed in."""
    return torch.promote_types(dtype, torch.float32)


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return dtype if device.type == "cuda" else accumulator(dtype)


def operand(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` as a factor beside others of `dtype`, by default its own."""
    return x.to(operand_dtype(x.dtype if dtype is None else dtype, x.device))


def addmm_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """out <- beta out + alpha a @ b, accumulated in out's dtype."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    return torch.addmm(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
