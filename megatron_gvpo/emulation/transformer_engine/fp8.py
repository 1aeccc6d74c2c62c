"""FP8 numbers and the scales of their blocks, on CPU tensors. Source: common/recipe and common/cast.

A value is multiplied by its block's scale and stored in FP8; the tensor stores the inverse of the scale.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
BLOCK = 128  # number of values in a block of blockwise scaling
MX_BLOCK = 32  # number of values in a block of mxfp8
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def dtype_of(fp8_dtype: object) -> torch.dtype:
    """Return PyTorch's dtype for E4M3 or E5M2. Raises NotImplementedError for other types."""
    name = getattr(fp8_dtype, "name", str(fp8_dtype))
    dtypes = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
    if name not in dtypes:
        raise NotImplementedError(f"quantized data of type {name}: only E4M3 and E5M2 are emulated")
    return dtypes[name]


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest FP8, ties to even, and return uint8; too large values become the largest number."""
    return values.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).view(torch.uint8)


def numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of FP8 bytes in fp32."""
    return data.view(dtype).float()


def scale_of(
    amax: Tensor, largest: float, is_power_of_2: bool, epsilon: float, largest_scale: float
) -> Tensor:
    """Return the scale that maps `amax` to `largest`; it is 1 where `amax` is 0 or not finite.

    With `is_power_of_2` the scale is rounded down to a power of two. A scale that overflows fp32 becomes
    `largest_scale`.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = torch.full_like(amax, largest) / amax
    scale = torch.where(scale.isinf(), largest_scale, scale)
    if is_power_of_2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)  # 0xFF800000: sign and exponent
    return torch.where(amax.isfinite() & (amax != 0), scale, 1.0)


def amax_of_blocks(values: Tensor, height: int, width: int) -> Tensor:
    """Return the largest absolute value of each block of a matrix; blocks at the edges may be smaller."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % width, 0, -rows % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax((1, 3))


def spread(blocks: Tensor, height: int, width: int, rows: int, columns: int) -> Tensor:
    """Repeat each block's number for all values of the block: [rows, columns]."""
    return blocks.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


def e8m0_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the exponents (uint8, biased by 127) of the smallest powers of two >= amax / largest number."""
    bits = (amax * (1.0 / LARGEST[dtype])).view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    is_rounded_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = torch.where(amax.isinf(), 0xFE, exponent + is_rounded_up)
    return torch.where(amax.isnan(), 0xFF, exponent).to(torch.uint8)


def power_of(e8m0: Tensor) -> Tensor:
    """Return the powers of two with these biased exponents, in fp32."""
    return torch.ldexp(torch.ones(()), e8m0.int() - 127)


def swizzled(scales: Tensor) -> Tensor:
    """Put mxfp8's scales [rows, columns] into the order that cuBLASLt reads; 128 divides rows, 4 columns.

    The order is that of tiles of 128 by 4, one row of tiles after the other. A tile consists of 32 groups of
    16 bytes, each with the four columns of rows i, i + 32, i + 64 and i + 96. Source: cuBLAS' documentation,
    "1D block scaling factors layout".
    """
    rows, columns = scales.shape
    return scales.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)


def unswizzled(scales: Tensor) -> Tensor:
    """Undo `swizzled`."""
    rows, columns = scales.shape
    return scales.view(rows // 128, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)
