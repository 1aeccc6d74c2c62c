"""Operations for which the CPU has no kernel, or another kernel than CUDA, composed of other operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_gvpo.emulation import flash_attention

aten = torch.ops.aten


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return aten._softmax(x.float() if half_to_float else x, dim, False)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return aten._log_softmax(x.float() if half_to_float else x, dim, False)


def _softmax_backward(grad: torch.Tensor, out: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return aten._softmax_backward_data(grad, out, dim, grad.dtype).to(dtype)


def _log_softmax_backward(
    grad: torch.Tensor, out: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    return aten._log_softmax_backward_data(grad, out, dim, grad.dtype).to(dtype)


def _mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


def _addmm(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> torch.Tensor:
    return aten.addmm(c.to(out_dtype), a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha)


def _mm_out(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_mm(a, b, dtype))


def _addmm_out(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    *,
    out: torch.Tensor,
    **factors: Any,
) -> torch.Tensor:
    return out.copy_(_addmm(c, a, b, dtype, **factors))


TABLE: dict[Any, Callable[..., Any]] = {
    aten._flash_attention_forward.default: flash_attention.forward,
    aten._flash_attention_backward.default: flash_attention.backward,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.mm.dtype: _mm,
    aten.bmm.dtype: _mm,
    aten.addmm.dtype: _addmm,
    aten.baddbmm.dtype: _addmm,
    aten.mm.dtype_out: _mm_out,
    aten.bmm.dtype_out: _mm_out,
    aten.addmm.dtype_out: _addmm_out,
    aten.baddbmm.dtype_out: _addmm_out,
}
