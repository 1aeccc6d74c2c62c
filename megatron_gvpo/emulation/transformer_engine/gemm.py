"""Matrix products with their epilogues. Source: csrc/extensions/gemm.cpp and common/gemm/cublaslt_gemm.cu.

The operands follow BLAS, whose matrices are column-major. In row-major terms the product is op(b) @ op(a),
where op transposes a matrix whose flag is set. It is summed in fp32 and rounded once, after the epilogue.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_gvpo.emulation.transformer_engine.activations import gelu, gelu_derivative
from megatron_gvpo.emulation.transformer_engine.quantization import Rounding, operand, write
from megatron_gvpo.emulation.transformer_engine.references import fill, read, reference, rows
from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Tensor = torch.Tensor


def product(a: Any, trans_a: bool, b: Any, trans_b: bool) -> Tensor:
    """Return the product [rows, columns] in fp32, from those copies of the operands that a GPU would read."""
    left, right = operand(b, is_rowwise=not trans_b), operand(a, is_rowwise=trans_a)
    return (left.T if trans_b else left) @ (right.T if trans_a else right)


@reference
def generic_gemm(
    result: list[Any],
    a: Any,
    trans_a: bool,
    b: Any,
    trans_b: bool,
    d: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> None:
    """`result`: the product, the bias' gradient or None, the input of GELU or None, and None."""
    if comm_overlap is not None:
        raise NotImplementedError("generic_gemm with overlapped communication (userbuffers)")
    out, bias_grad, gelu_input, _ = result
    values = alpha * product(a, trans_a, b, trans_b)
    if bias is not None and not grad:
        values = values + read(bias.contiguous())
    values = _gelu_epilogue(values, gelu, grad, gelu_input if gelu_in is None else gelu_in)
    if bias is not None and grad:
        # The bias' gradient sums the rows of the output's gradient, which is `b`, or of its product with
        # GELU's derivative.
        summed = values if gelu else operand(b, is_rowwise=not trans_b)
        fill(bias_grad, summed.sum(0))
    if accumulate:
        values = values + (1.0 if beta is None else beta) * rows(read(out))
    write(out, values.view(out.shape), quantizer, Rounding(torch.bfloat16))


def _gelu_epilogue(values: Tensor, has_gelu: bool, is_backward: bool, gelu_input: Tensor | None) -> Tensor:
    if not has_gelu or gelu_input is None:
        return values
    if is_backward:
        return values * gelu_derivative(rows(read(gelu_input)))
    fill(gelu_input, values.view(gelu_input.shape))
    return gelu(values)


@reference
def te_general_grouped_gemm(
    result: list[Tensor] | None,
    a: list[Any],
    trans_a: bool,
    b: list[Any],
    trans_b: bool,
    d: list[Tensor] | None,
    d_type: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> None:
    """Compute one product for each expert, into a tensor each or, one after the other, into a single tensor.

    `bias` has one tensor for each expert: it is added if `grad` is false, and receives the bias' gradient if
    `grad` is true. An empty tensor means that the expert has no bias.
    """
    if d is None:
        raise NotImplementedError("te_general_grouped_gemm without outputs")
    memory = alias(d[0]).view(-1) if single_output else None
    begin = 0
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        has_gelu = pre_gelu_out[i].numel() > 0
        values = product(one, trans_a, other, trans_b)
        if bias[i].numel() and not grad:
            values = values + read(bias[i])
        values = _gelu_epilogue(values, has_gelu, grad, pre_gelu_out[i] if has_gelu else None)
        if bias[i].numel() and grad:
            fill(bias[i], (values if has_gelu else operand(other, is_rowwise=not trans_b)).sum(0))
        if memory is None:
            target = rows(alias(d[i]))
        else:
            target = memory[begin : begin + values.numel()].view(values.shape)
            begin += values.numel()
        if values.numel():
            target.copy_(target.float() + values if accumulate else values)
