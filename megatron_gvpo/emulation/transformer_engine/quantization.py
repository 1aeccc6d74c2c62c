"""FP8 tensors with their scales: tensorwise, blockwise and mxfp8. Source: csrc/quantizer.cpp, common/cast.

A matrix product that sums along the rows of an operand reads the operand's rowwise data; one that sums along
columns reads its columnwise data, which tensorwise and blockwise tensors store transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_gvpo.emulation.transformer_engine import fp8
from megatron_gvpo.emulation.transformer_engine.references import fill, is_plain, read, reference, rows
from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Tensor = torch.Tensor
_LARGEST_FP32 = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Rounding:
    """How an operation rounds its fp32 results before they are quantized.

    `dtype`: the operation's dtype, to which a kernel that cannot write FP8 itself first rounds its results.
    `has_fused_mxfp8`: a kernel of this operation writes mxfp8 itself.
    """

    dtype: torch.dtype
    has_fused_mxfp8: bool = False


def write(out: Any, values: Tensor, quantizer: Any = None, rounding: Rounding | None = None) -> None:
    """Write fp32 values into a result tensor, rounded to its dtype or quantized by its quantizer."""
    if is_plain(out):
        fill(out, values)
        return
    if values.numel() == 0:
        return
    quantizer = quantizer if quantizer is not None else out._quantizer
    dtype = torch.float32 if rounding is None else rounding.dtype
    values, rounded = rows(values), rows(values.to(dtype).float())
    if hasattr(out, "_data"):
        _write_tensorwise(out, values, rounded, quantizer)
    elif hasattr(out, "_is_2D_scaled"):
        _write_blockwise(out, rounded, quantizer, torch.finfo(dtype).max)
    elif "MXFP8" in type(out).__name__:
        _write_mxfp8(out, values if rounding is not None and rounding.has_fused_mxfp8 else rounded, quantizer)
    else:
        raise NotImplementedError(f"quantization to {type(out).__name__}")


def _write_tensorwise(out: Any, values: Tensor, rounded: Tensor, quantizer: Any) -> None:
    """Write with one scale, from earlier steps (delayed scaling) or from these values (current scaling)."""
    dtype = fp8.dtype_of(out._fp8_dtype)
    amax = values.abs().amax()
    if hasattr(quantizer, "scale"):
        scale = alias(quantizer.scale).float().view(())
        if quantizer.amax.numel():  # it is empty where the optimizer casts weights with a known scale
            recorded = alias(quantizer.amax)
            recorded.copy_(torch.maximum(recorded, amax.view(recorded.shape)))
        rounded = values  # the kernel of delayed scaling writes FP8 itself
    else:
        if quantizer.with_amax_reduction:
            group = quantizer._canonicalized_amax_reduction_group()
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
        power, epsilon = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        scale = fp8.scale_of(amax, fp8.LARGEST[dtype], power, epsilon, _LARGEST_FP32)
    alias(out._scale_inv).copy_(1 / scale)
    data = fp8.cast(rounded * scale, dtype)
    if out._data is not None:
        rows(alias(out._data)).copy_(data)
    if out._transpose is not None and not out._transpose_invalid:
        alias(out._transpose).view(data.shape[1], -1).copy_(data.T)


def _write_blockwise(out: Any, values: Tensor, quantizer: Any, largest_scale: float) -> None:
    """Write with a scale for each block: 1 x 128 values along the sum, or 128 x 128 for weights."""
    dtype = fp8.dtype_of(out._fp8_dtype)
    for is_rowwise, data, scale_inv in _copies(out):
        # The columnwise copy, data and scales, equals the rowwise copy of the transposed matrix.
        matrix = values if is_rowwise else values.T
        height = fp8.BLOCK if out._is_2D_scaled else 1
        amax = fp8.amax_of_blocks(matrix, height, fp8.BLOCK)
        power, epsilon = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        scale = fp8.scale_of(amax, fp8.LARGEST[dtype], power, epsilon, largest_scale)
        scaled = matrix * fp8.spread(scale, height, fp8.BLOCK, *matrix.shape)
        data.view(matrix.shape).copy_(fp8.cast(scaled, dtype))
        inverse = 1 / (scale if out._is_2D_scaled else scale.T)  # scales of 1 x 128 blocks are transposed
        scale_inv[: inverse.shape[0], : inverse.shape[1]] = inverse


def _write_mxfp8(out: Any, values: Tensor, quantizer: Any) -> None:
    """Write with a power of two as the scale of each block of 32 values along the sum."""
    if getattr(quantizer, "with_2d_quantization", False):
        raise NotImplementedError("mxfp8 with blocks of 32 x 32 is not emulated: use blocks of 1 x 32")
    dtype = fp8.dtype_of(out._fp8_dtype)
    for is_rowwise, data, scale_inv in _copies(out):
        block = (1, fp8.MX_BLOCK) if is_rowwise else (fp8.MX_BLOCK, 1)
        exponent = fp8.e8m0_of(fp8.amax_of_blocks(values, *block), dtype)
        scaled = values / fp8.spread(fp8.power_of(exponent), *block, *values.shape)
        rows(data).copy_(fp8.cast(scaled, dtype))
        padded = torch.zeros_like(scale_inv)
        padded[: exponent.shape[0], : exponent.shape[1]] = exponent
        scale_inv.copy_(_in_order_of_gemm(padded, is_rowwise) if out._with_gemm_swizzled_scales else padded)


def _copies(tensor: Any) -> list[tuple[bool, Tensor, Tensor]]:
    """Return, for each copy of a block-scaled tensor: whether it is rowwise, its data, its inverse scales."""
    pairs = [
        (True, tensor._rowwise_data, tensor._rowwise_scale_inv),
        (False, tensor._columnwise_data, tensor._columnwise_scale_inv),
    ]
    return [(rowwise, alias(data), alias(scale)) for rowwise, data, scale in pairs if data is not None]


def _in_order_of_gemm(scales: Tensor, is_rowwise: bool) -> Tensor:
    return fp8.swizzled(scales) if is_rowwise else fp8.swizzled(scales.T.contiguous()).view(scales.shape)


def _in_plain_order(scales: Tensor, is_rowwise: bool) -> Tensor:
    if is_rowwise:
        return fp8.unswizzled(scales)
    return fp8.unswizzled(scales.reshape(scales.shape[1], scales.shape[0])).T


def operand(tensor: Any, is_rowwise: bool) -> Tensor:
    """Return [rows, columns] in fp32: the copy of a product's operand that the hardware would read.

    Raises ValueError if the tensor lacks this copy.
    """
    if is_plain(tensor):
        return rows(read(tensor))
    if hasattr(tensor, "_data"):
        return _tensorwise(tensor, is_rowwise or (_has_all_layouts() and tensor._data is not None))
    copies = {rowwise: (data, scale) for rowwise, data, scale in _copies(tensor)}
    if is_rowwise not in copies:
        raise ValueError(f"{type(tensor).__name__} lacks its {'row' if is_rowwise else 'column'}wise data")
    data, scale_inv = copies[is_rowwise]
    dtype = fp8.dtype_of(tensor._fp8_dtype)
    if hasattr(tensor, "_is_2D_scaled"):
        data = rows(data) if is_rowwise else data.flatten(1)  # columnwise: [columns, ...]
        matrix = _blockwise(data, scale_inv, tensor._is_2D_scaled, dtype)
        return matrix if is_rowwise else matrix.T
    if "MXFP8" not in type(tensor).__name__:
        raise NotImplementedError(f"a product of {type(tensor).__name__}")
    exponent = _in_plain_order(scale_inv, is_rowwise) if tensor._with_gemm_swizzled_scales else scale_inv
    block = (1, fp8.MX_BLOCK) if is_rowwise else (fp8.MX_BLOCK, 1)
    matrix = rows(data)
    return fp8.numbers(matrix, dtype) * fp8.spread(fp8.power_of(exponent), *block, *matrix.shape)


def _tensorwise(tensor: Any, is_rowwise: bool) -> Tensor:
    dtype, scale_inv = fp8.dtype_of(tensor._fp8_dtype), alias(tensor._scale_inv).view(())
    if is_rowwise and tensor._data is not None:
        return fp8.numbers(rows(alias(tensor._data)), dtype) * scale_inv
    if tensor._transpose is None or tensor._transpose_invalid:
        raise ValueError(f"{type(tensor).__name__} lacks its {'row' if is_rowwise else 'column'}wise data")
    transposed = alias(tensor._transpose)
    return (fp8.numbers(transposed.view(transposed.shape[0], -1), dtype) * scale_inv).T


def _has_all_layouts() -> bool:
    """True from Blackwell on, where products of FP8 tensors read the rowwise data for either direction."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10


def _blockwise(data: Tensor, scale_inv: Tensor, is_2d: bool, dtype: torch.dtype) -> Tensor:
    height = fp8.BLOCK if is_2d else 1
    blocks = scale_inv if is_2d else scale_inv.T
    return fp8.numbers(data, dtype) * fp8.spread(blocks, height, fp8.BLOCK, *data.shape)


def _is_skipped(noop: Tensor | None) -> bool:
    return noop is not None and alias(noop).view(-1)[0].item() == 1


@reference
def quantize(
    result: Any, tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None
) -> None:
    """Write the FP8 data and scales of a tensor; if `noop` [1] is 1, nothing is written."""
    if not _is_skipped(noop):
        write(result, read(tensor.contiguous()), quantizer, Rounding(tensor.dtype))


@reference
def multi_tensor_quantize(result: list[Any], tensor_list: list[Tensor], quantizer_list: list[Any]) -> None:
    for out, tensor, quantizer in zip(result, tensor_list, quantizer_list, strict=True):
        quantize(out, tensor, quantizer)


@reference
def split_quantize(
    result: list[Any],
    tensor: Tensor,
    split_sections: list[int],
    quantizer_list: list[Any],
    disable_bulk_allocation: bool = False,
) -> None:
    """Quantize consecutive parts of a tensor; rows after the last part are ignored."""
    begin = 0
    for out, size, quantizer in zip(result, split_sections, quantizer_list, strict=True):
        quantize(out, tensor[begin : begin + size], quantizer)
        begin += size


@reference
def bgrad_quantize(result: list[Any], input: Tensor, quantizer: Any) -> None:
    """`result`: the bias' gradient, which is a sum over rows, and the quantized gradient."""
    values = read(input.contiguous())
    fill(result[0], rows(values).sum(0))
    if quantizer is not None:
        write(result[1], values, quantizer, Rounding(input.dtype))


@reference
def dequantize(result: Tensor, input: Any, otype: Any) -> None:
    has_rowwise = getattr(input, "_data", getattr(input, "_rowwise_data", None)) is not None
    fill(result, operand(input, has_rowwise).reshape(result.shape))


@reference
def fp8_transpose(result: Tensor, input: Tensor, dtype: Any, *, out: Tensor | None = None) -> None:
    """Transpose bytes [.., columns] to [columns, ..]."""
    matrix = rows(alias(input))
    alias(result).view(matrix.shape[1], -1).copy_(matrix.T)


@reference
def swap_first_dims(result: Tensor, tensor: Tensor, *, out: Tensor | None = None) -> None:
    first, second, *rest = tensor.shape
    alias(result).view(second, first, *rest).copy_(alias(tensor).transpose(0, 1))


@reference
def compute_amax(result: None, input: Tensor, amax: Tensor) -> None:
    """Write the largest absolute value of the input into `amax` [1]."""
    values = alias(input)
    alias(amax).fill_(values.float().abs().max().item() if values.numel() else 0.0)


@reference
def multi_tensor_compute_scale_and_scale_inv(
    result: None,
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Compute scales and their inverses. The lists: largest absolute values, scales, inverse scales."""
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        values = fp8.scale_of(read(amax), max_fp8, force_pow_2_scales, epsilon, _LARGEST_FP32)
        fill(scale, values)
        fill(scale_inv, 1 / values)


@reference
def fused_amax_and_scale_update_after_reduction(
    result: None,
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Delayed scaling: compute scales [n] from histories [steps, n], then shift the histories by a row."""
    largest = fp8.LARGEST[fp8.dtype_of(fp8_dtype)] * 2.0**-margin
    reduced = alias(amax_reduction_buffer).split([history.shape[1] for history in amax_histories])
    for history, scale, newest in zip(map(alias, amax_histories), map(alias, scales), reduced, strict=True):
        history[0] = newest
        rolled = history.roll(-1, 0)
        amax = history[0].clone() if amax_compute_algo == "most_recent" else history.amax(0)
        updated = (torch.full_like(amax, largest) / amax).clamp(max=_LARGEST_FP32)
        scale.copy_(torch.where(amax.isfinite() & (amax > 0), updated, scale))
        rolled[0] = 0
        history.copy_(rolled)


@reference
def fp8_block_scaling_compute_partial_amax(
    result: None, tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Compute the largest absolute values of the blocks of a matrix [h, w], of which `tensor` [n] is a part.

    `amax` may have further columns, as scales have; they remain zero.
    """
    blocks = fp8.amax_of_blocks(_part(tensor, h, w, start_offset), block_len, block_len)
    alias(amax)[: blocks.shape[0], : blocks.shape[1]] = blocks


@reference
def fp8_block_scaling_partial_cast(
    result: None,
    inp: Tensor,
    out: Tensor,
    scale: Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: Any,
) -> None:
    """Write the FP8 bytes of a part of a matrix [h, w], after multiplying each value by its block's scale."""
    scaled = _part(inp, h, w, start_offset) * fp8.spread(alias(scale), block_len, block_len, h, w)
    data = fp8.cast(scaled.view(-1)[start_offset : start_offset + inp.numel()], fp8.dtype_of(out_dtype))
    alias(out).view(-1)[: len(data)] = data


def _part(tensor: Tensor, h: int, w: int, start: int) -> Tensor:
    """Return a matrix [h, w] with the values of `tensor` from index `start` on, and zeros elsewhere."""
    matrix = torch.zeros(h * w)
    matrix[start : start + tensor.numel()] = read(tensor).view(-1)
    return matrix.view(h, w)
