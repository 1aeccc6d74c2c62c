"""Activations and their backward passes, in fp32. Source: transformer_engine/common/util/math.h.

A gated activation splits the last dimension into halves, applies the function to the first half and
multiplies the result by the second half.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from megatron_gvpo.emulation.transformer_engine.quantization import Rounding, write
from megatron_gvpo.emulation.transformer_engine.references import fill, read, reference, reference_of, rows
from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]
_QUICK = 1.702  # factor in GELU's approximation by a sigmoid


def gelu(x: Tensor) -> Tensor:
    """GELU, approximated with tanh: the kernels have only this form."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_derivative(x: Tensor) -> Tensor:
    root = math.sqrt(2 / math.pi)
    tanh = torch.tanh(root * x * (1 + 0.044715 * x * x))
    return 0.5 * x * (1 - tanh * tanh) * root * (1 + 3 * 0.044715 * x * x) + 0.5 * (1 + tanh)


def swish(x: Tensor, alpha: float = 1.0) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def swish_derivative(x: Tensor, alpha: float = 1.0) -> Tensor:
    sigmoid = torch.sigmoid(alpha * x)
    return alpha * x * sigmoid * (1 - sigmoid) + sigmoid


def _sigmoid_derivative(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 - sigmoid)


# Each row: the name of the plain form, the name of the gated form, the function and its derivative.
_FUNCTIONS: list[tuple[str | None, str | None, Function, Function]] = [
    (None, "glu", torch.sigmoid, _sigmoid_derivative),
    ("gelu", "geglu", gelu, gelu_derivative),
    (
        "qgelu",
        "qgeglu",
        functools.partial(swish, alpha=_QUICK),
        functools.partial(swish_derivative, alpha=_QUICK),
    ),
    ("relu", "reglu", torch.relu, lambda x: (x > 0).float()),
    ("srelu", "sreglu", lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x)),
    ("silu", "swiglu", swish, swish_derivative),
]


def _forward(function: Function, out: Any, input: Tensor, quantizer: Any) -> None:
    write(out, function(read(input.contiguous())), quantizer, Rounding(input.dtype, has_fused_mxfp8=True))


def _backward(derivative: Function, out: Any, grad: Tensor, fwd_input: Tensor, quantizer: Any) -> None:
    values = read(grad.contiguous()) * derivative(read(fwd_input.contiguous()))
    write(out, values, quantizer, Rounding(fwd_input.dtype, has_fused_mxfp8=True))


def _bias_backward(
    derivative: Function, result: list[Any], grad: Tensor, fwd_input: Tensor, quantizer: Any
) -> None:
    """`result`: the bias' gradient, summed before quantization, and the input's gradient."""
    values = read(grad.contiguous()) * derivative(read(fwd_input.contiguous()))
    fill(result[0], rows(values).sum(0))
    write(result[1], values, quantizer, Rounding(grad.dtype, has_fused_mxfp8=True))


def gated(function: Function, x: Tensor) -> Tensor:
    act, gate = x.chunk(2, -1)
    return function(act) * gate


def gated_gradient(function: Function, derivative: Function, grad: Tensor, x: Tensor) -> Tensor:
    act, gate = x.chunk(2, -1)
    return torch.cat([grad * derivative(act) * gate, grad * function(act)], -1)


def _gated_forward(function: Function, out: Any, input: Tensor, quantizer: Any) -> None:
    write(
        out, gated(function, read(input.contiguous())), quantizer, Rounding(input.dtype, has_fused_mxfp8=True)
    )


def _gated_backward(
    function: Function, derivative: Function, out: Any, grad: Tensor, fwd_input: Tensor, quantizer: Any
) -> None:
    values = gated_gradient(function, derivative, read(grad.contiguous()), read(fwd_input.contiguous()))
    write(out, values, quantizer, Rounding(fwd_input.dtype, has_fused_mxfp8=True))


def _register() -> None:
    for plain, gate, function, derivative in _FUNCTIONS:
        if plain is not None:
            reference_of(plain, functools.partial(_forward, function))
            reference_of(f"d{plain}", functools.partial(_backward, derivative))
            reference_of(f"dbias_d{plain}", functools.partial(_bias_backward, derivative))
        if gate is not None:
            reference_of(gate, functools.partial(_gated_forward, function))
            reference_of(f"d{gate}", functools.partial(_gated_backward, function, derivative))


_register()


@reference
def clamped_swiglu(
    out: Any,
    input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> None:
    """SwiGLU of gpt-oss: both halves are clamped, and an offset is added to the second half."""
    act, gate = read(input.contiguous()).chunk(2, -1)
    values = swish(act.clamp(max=limit), alpha) * (gate.clamp(-limit, limit) + glu_linear_offset)
    write(out, values, quantizer, Rounding(input.dtype, has_fused_mxfp8=True))


@reference
def clamped_dswiglu(
    out: Any,
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> None:
    """The backward pass of `clamped_swiglu`; the gradient of a clamped value is zero."""
    act, gate = read(fwd_input.contiguous()).chunk(2, -1)
    grad_out = read(grad.contiguous())
    derivative = swish_derivative(act.clamp(max=limit), alpha) * (act <= limit)
    d_act = grad_out * derivative * (gate.clamp(-limit, limit) + glu_linear_offset)
    d_gate = grad_out * swish(act.clamp(max=limit), alpha) * (gate.abs() <= limit)
    write(out, torch.cat([d_act, d_gate], -1), quantizer, Rounding(fwd_input.dtype, has_fused_mxfp8=True))


def _weights(act_scales: Tensor, like: Tensor) -> Tensor:
    """Reshape the factors of the rows so that `like` can be multiplied by them."""
    return alias(act_scales).float().reshape(*like.shape[:-1], 1)


@reference
def scaled_swiglu(
    out: Any, input: Tensor, act_scales: Tensor, quantizer: Any, glu_interleave_size: int = 0
) -> None:
    """SwiGLU times one factor for each row: the probability with which the row's expert was chosen."""
    _refuse_interleaved("scaled_swiglu", glu_interleave_size)
    x = read(input.contiguous())
    write(
        out, gated(swish, x) * _weights(act_scales, x), quantizer, Rounding(input.dtype, has_fused_mxfp8=True)
    )


@reference
def scaled_dswiglu(
    result: tuple[Any, Tensor | None],
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> None:
    """`result`: the gradients of the input and of the factors."""
    _refuse_interleaved("scaled_dswiglu", glu_interleave_size)
    x, grad_out = read(fwd_input.contiguous()), read(grad.contiguous())
    values = gated_gradient(swish, swish_derivative, grad_out * _weights(act_scales, x), x)
    write(result[0], values, quantizer, Rounding(fwd_input.dtype, has_fused_mxfp8=True))
    if compute_scale_grad and result[1] is not None:
        fill(result[1], (grad_out * gated(swish, x)).sum(-1).view(result[1].shape))


def _refuse_interleaved(name: str, size: int) -> None:
    if size:
        raise NotImplementedError(f"{name} with interleaved halves")
