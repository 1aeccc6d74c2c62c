"""fp32 matrix products by oneDNN, on processors where PyTorch's own choice is slower.

PyTorch gives fp32 products to MKL, which leaves AVX-512 unused on processors that are not Intel's. oneDNN is
part of PyTorch, too, and uses it: on an AMD Zen 5 the products of a small model's layers take 0.4 to 0.7 of
the time (docs/explanation/cpu_speed.md). Both sum in fp32; only the order of their sums differs. PyTorch has
no setting for this choice. Its operator `mkldnn::_linear_pointwise`, which torch.compile uses, has no
gradient, so products that autograd follows stay with MKL: Megatron's layers have a backward pass of their
own, and sampling needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_FEWEST_ROWS = 32  # with fewer rows, MKL is as fast


def is_faster() -> bool:
    """True for an AMD processor with AVX-512."""
    processors = Path("/proc/cpuinfo")
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processors.exists()
        and "AuthenticAMD" in processors.read_text()
    )


def matmul(a: Tensor, b: Tensor, **named: Any) -> Tensor:
    """Like torch.matmul; [..., k] @ [k, n] with many rows goes to oneDNN."""
    if named or b.dim() != 2 or not _suits(a, b.t()):
        return torch.matmul(a, b, **named)
    if a.dim() == 2 and b.shape[1] < a.shape[0] and not a.is_contiguous():
        # A weight's gradient has such operands. oneDNN copies a transposed first operand: give it the smaller
        # one.
        return _product(b.t(), a, None).t()
    return _product(a, b.t(), None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like torch.nn.functional.linear; with many rows it goes to oneDNN."""
    if not _suits(x, weight):
        return nn.functional.linear(x, weight, bias)
    return _product(x, weight, bias)


class Linear(nn.Linear):
    """A linear layer of a model that is only sampled from. `model.__class__` may be set to it."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def use_in(model: nn.Module) -> None:
    """Let the linear layers of `model` go to oneDNN, if it is faster here."""
    if is_faster():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.is_cpu
        and x.dim() > 1
        and x.shape[-1] == weight.shape[-1]
        and x.numel() >= _FEWEST_ROWS * x.shape[-1] > 0
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias"""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    nn.functional.linear: linear,
}
