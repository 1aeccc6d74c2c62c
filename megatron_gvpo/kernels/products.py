"""Matrix products whose results are always fp32; on CUDA the operands keep the parameters' dtype.

So bf16 operands use the tensor cores. A CPU has no bf16 product with an fp32 result: there the operands are
converted first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of operands of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return dtype if device.type == "cuda" else accumulator(dtype)


def operand(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Convert `x` for a product with operands of `dtype` (default: its own dtype)."""
    return x.to(operand_dtype(x.dtype if dtype is None else dtype, x.device))


def addmm_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """out <- beta out + alpha a @ b, accumulated in out's dtype."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    return torch.addmm(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
