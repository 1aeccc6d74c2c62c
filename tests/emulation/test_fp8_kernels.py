"""References of FP8 numbers, scales and layouts against their definitions, number by number, on the CPU."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gvpo.emulation.transformer_engine import fp8, install, quantization  # noqa: F401 - the table
from megatron_gvpo.emulation.transformer_engine.gemm import product
from megatron_gvpo.emulation.transformer_engine.quantization import Rounding
from megatron_gvpo.emulation.transformer_engine.references import TABLE

Tensor = torch.Tensor
E4M3, E5M2 = SimpleNamespace(name="kFloat8E4M3"), SimpleNamespace(name="kFloat8E5M2")
# Bits of exponent and of mantissa, the exponent's bias, and the first byte that is not a finite number.
FORMATS = {"kFloat8E4M3": (4, 3, 7, 0x7F), "kFloat8E5M2": (5, 2, 15, 0x7C)}
DTYPES = {name: fp8.dtype_of(SimpleNamespace(name=name)) for name in FORMATS}


def table_of(name: str) -> list[Fraction]:
    """The positive numbers of a format, by byte, from the definition of its bits (arXiv 2209.05433)."""
    _, mantissa_bits, bias, end = FORMATS[name]
    numbers = []
    for byte in range(end):
        exponent, mantissa = byte >> mantissa_bits, byte & (2**mantissa_bits - 1)
        unit = Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)
        numbers.append(unit * (mantissa + (2**mantissa_bits if exponent else 0)))
    return numbers


def nearest(value: float, numbers: list[Fraction]) -> int:
    """The byte of the nearest number, the even one of two; of the largest for larger ones."""
    exact = abs(Fraction(value))
    best = min(range(len(numbers)), key=lambda byte: (abs(numbers[byte] - exact), byte % 2))
    return best | (0x80 if math.copysign(1, value) < 0 else 0)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_definition(name: str) -> None:
    numbers = table_of(name)
    data = torch.arange(len(numbers), dtype=torch.uint8)
    assert fp8.numbers(data, DTYPES[name]).tolist() == [float(number) for number in numbers]
    assert fp8.LARGEST[DTYPES[name]] == numbers[-1]


@pytest.mark.parametrize("name", FORMATS)
def test_values_become_the_nearest_number(name: str) -> None:
    torch.manual_seed(0)
    numbers = table_of(name)
    middles = [float((a + b) / 2) for a, b in itertools.pairwise(numbers)]
    values = torch.tensor([*middles, *(-middle for middle in middles), 0.0, 1e9, -1e9, math.inf, -math.inf])
    values = torch.cat([values, torch.randn(500) * torch.logspace(-6, 5, 500)])
    expected = [nearest(min(max(v, -1e30), 1e30), numbers) for v in values.tolist()]
    assert fp8.cast(values, DTYPES[name]).tolist() == expected
    assert fp8.numbers(fp8.cast(torch.tensor([math.nan]), DTYPES[name]), DTYPES[name]).isnan().all()


@pytest.mark.parametrize("is_power_of_2", [False, True])
def test_scales(is_power_of_2: bool) -> None:
    amax = torch.tensor([1.0, 448.0, 447.0, 3.1, 1e-3, 0.0, math.inf, math.nan, 1e-45])
    scale = fp8.scale_of(amax, 448.0, is_power_of_2, 0.0, 1e38).tolist()
    for value, computed in zip([1.0, 448.0, 447.0, 3.1, 1e-3], scale, strict=False):
        exact = Fraction(448) / Fraction(torch.tensor(value).item())
        if is_power_of_2:
            assert computed == 2.0 ** math.floor(math.log2(exact))
        else:
            assert abs(Fraction(computed) - exact) <= exact * Fraction(2) ** -24
    assert scale[5:8] == [1, 1, 1]
    largest = torch.tensor(1e38).item()
    assert scale[8] == (2.0 ** math.floor(math.log2(largest)) if is_power_of_2 else largest)
    assert fp8.scale_of(torch.tensor([1e-9]), 448.0, is_power_of_2, 7.0, 1e38).item() == 64


@pytest.mark.parametrize("name", FORMATS)
def test_exponents_of_mxfp8_are_the_next_power_of_two(name: str) -> None:
    torch.manual_seed(0)
    largest = fp8.LARGEST[DTYPES[name]]
    amax = torch.cat([torch.rand(200) * torch.logspace(-30, 30, 200), largest * 2.0 ** torch.arange(-9, 9)])
    exponents = fp8.e8m0_of(amax, DTYPES[name])
    for value, exponent in zip(amax.tolist(), exponents.tolist(), strict=True):
        assert exponent == 127 + math.ceil(math.log2(value / largest)), value
    assert torch.equal(fp8.power_of(exponents).log2(), exponents.float() - 127)
    special = fp8.e8m0_of(torch.tensor([0.0, math.inf, math.nan]), DTYPES[name])
    assert special.tolist() == [0, 0xFE, 0xFF]


def test_order_of_scales_for_cublas() -> None:
    """By the formula of cuBLAS' documentation, place by place."""
    scales = torch.arange(256 * 8).view(256, 8)
    flat = fp8.swizzled(scales).flatten().tolist()
    for row in range(256):
        for column in range(8):
            tile = (row // 128) * 2 + column // 4
            index = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
            assert flat[index] == scales[row, column]
    assert torch.equal(fp8.unswizzled(fp8.swizzled(scales)), scales)


def tensorwise(rows: int, columns: int, **quantizer: Any) -> tuple[Any, Any]:
    out = SimpleNamespace(
        _data=torch.empty(rows, columns, dtype=torch.uint8),
        _transpose=torch.empty(columns, rows, dtype=torch.uint8),
        _transpose_invalid=False,
        _scale_inv=torch.empty(1),
        _fp8_dtype=E4M3,
    )
    return out, SimpleNamespace(**quantizer)


CURRENT = {"with_amax_reduction": False, "force_pow_2_scales": False, "amax_epsilon": 0.0}


def test_current_scaling() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 10).bfloat16()
    out, quantizer = tensorwise(6, 10, **CURRENT)
    TABLE["quantize"](out, x, quantizer)
    scale = torch.tensor(448.0) / x.float().abs().max()
    numbers = table_of("kFloat8E4M3")
    expected = [nearest(value, numbers) for value in (x.float() * scale).flatten().tolist()]
    assert out._data.flatten().tolist() == expected and torch.equal(out._transpose, out._data.T)
    assert out._scale_inv.item() == (1 / scale).item()
    values = torch.empty(6, 10)
    TABLE["dequantize"](values, out, None)
    # Half a unit of three bits of mantissa, or of the smallest numbers.
    assert ((values - x.float()).abs() <= x.float().abs() / 16 + 2.0**-10 * out._scale_inv).all()


def test_an_amax_before_rounding_scales_values_after_it() -> None:
    """A norm's kernel takes the amax in fp32, and its output in bf16 is what is cast."""
    out, quantizer = tensorwise(1, 2, **CURRENT)
    values = torch.tensor([[1.0 + 2.0**-10, 0.5]])
    quantization.write(out, values, quantizer, Rounding(torch.bfloat16))
    assert out._scale_inv.item() == (1 / (torch.tensor(448.0) / (1 + 2.0**-10))).item()
    assert fp8.numbers(out._data, torch.float8_e4m3fn)[0, 0] == 448


def test_delayed_scaling() -> None:
    amax, scale = torch.tensor([3.0]), torch.tensor([16.0])
    out, quantizer = tensorwise(1, 3, scale=scale, amax=amax)
    TABLE["quantize"](out, torch.tensor([[1.0, -5.0, 100.0]]), quantizer)
    assert fp8.numbers(out._data, torch.float8_e4m3fn).tolist() == [[16, -80, 448]]
    assert amax.item() == 100 and out._scale_inv.item() == 1 / 16
    history = torch.tensor([[9.0, 1.0], [2.0, 7.0], [5.0, 6.0]])
    scales = torch.tensor([1.0, 1.0])
    reduced = torch.tensor([4.0, 0.0])
    TABLE["fused_amax_and_scale_update_after_reduction"](None, reduced, [history], [scales], "max", E4M3, 1)
    assert history.tolist() == [[0, 0], [5, 6], [4, 0]] and scales.tolist() == pytest.approx([224 / 5, 32])


def test_a_no_op_changes_nothing() -> None:
    out, quantizer = tensorwise(1, 2, **CURRENT)
    TABLE["quantize"](out, torch.ones(1, 2), quantizer)
    before = out._data.clone()
    TABLE["quantize"](out, torch.zeros(1, 2), quantizer, None, torch.ones(1))
    assert torch.equal(out._data, before)
    TABLE["quantize"](out, torch.zeros(1, 2), quantizer, None, torch.zeros(1))
    assert out._data.eq(0).all()


def blockwise(rows: int, columns: int, is_2d: bool) -> tuple[Any, Any]:
    """The shapes of csrc/quantizer.cpp: scales are padded to four."""

    def blocks(size: int) -> int:
        return -(-size // 128)

    def padded(size: int) -> int:
        return -(-size // 4) * 4

    def scales(rows: int, columns: int) -> Tensor:
        shape = (blocks(rows), padded(blocks(columns))) if is_2d else (blocks(columns), padded(rows))
        return torch.full(shape, torch.nan)

    out = SimpleNamespace(
        _rowwise_data=torch.empty(rows, columns, dtype=torch.uint8),
        _columnwise_data=torch.empty(columns, rows, dtype=torch.uint8),
        _rowwise_scale_inv=scales(rows, columns),
        _columnwise_scale_inv=scales(columns, rows),
        _is_2D_scaled=is_2d,
        _fp8_dtype=E4M3,
    )
    return out, SimpleNamespace(force_pow_2_scales=True, amax_epsilon=0.0)


def block_scale(block: Tensor) -> float:
    return 2.0 ** math.floor(math.log2(448 / block.abs().max().item()))


@pytest.mark.parametrize("is_2d", [False, True])
def test_blockwise_scaling(is_2d: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(130, 260) * torch.logspace(-3, 3, 260)
    out, quantizer = blockwise(130, 260, is_2d)
    TABLE["quantize"](out, x, quantizer)
    for row, column in ((0, 0), (5, 127), (127, 128), (128, 130), (129, 259), (60, 200)):
        top, left = row // 128 * 128, column // 128 * 128
        along = x[top : top + 128, left : left + 128] if is_2d else x[row, left : left + 128]
        across = x[top : top + 128, left : left + 128] if is_2d else x[top : top + 128, column]
        index = (row // 128, column // 128) if is_2d else (column // 128, row)
        assert out._rowwise_scale_inv[index] == 1 / block_scale(along)
        index = (column // 128, row // 128) if is_2d else (row // 128, column)
        assert out._columnwise_scale_inv[index] == 1 / block_scale(across)
        numbers = table_of("kFloat8E4M3")
        assert out._rowwise_data[row, column] == nearest(
            (x[row, column] * block_scale(along)).item(), numbers
        )
        expected = nearest((x[row, column] * block_scale(across)).item(), numbers)
        assert out._columnwise_data[column, row] == expected
    assert_near(quantization.operand(out, True), x, is_2d)
    assert_near(quantization.operand(out, False), x, is_2d)


def assert_near(values: Tensor, x: Tensor, is_2d: bool = True) -> None:
    """Half a unit of three bits of mantissa; smaller numbers: of the smallest of their block."""
    error = (values - x).abs()
    block_max = fp8.spread(fp8.amax_of_blocks(x, 128, 128), 128, 128, *x.shape)
    assert (error <= x.abs() / 16 + block_max * 2.0**-17).all()


class MXFP8Data(SimpleNamespace):
    """The fields of Transformer Engine's MXFP8Tensor."""


def mxfp8(rows: int, columns: int, is_swizzled: bool) -> tuple[Any, Any]:
    def padded(size: int, to: int) -> int:
        return -(-size // to) * to

    scales = {
        "_rowwise_scale_inv": (padded(rows, 128), padded(columns // 32, 4)),
        "_columnwise_scale_inv": (padded(rows // 32, 4), padded(columns, 128)),
    }
    out = MXFP8Data(
        _rowwise_data=torch.empty(rows, columns, dtype=torch.uint8),
        _columnwise_data=torch.empty(rows, columns, dtype=torch.uint8),
        _fp8_dtype=E4M3,
        _with_gemm_swizzled_scales=is_swizzled,
        **{name: torch.full(shape, 77, dtype=torch.uint8) for name, shape in scales.items()},
    )
    return out, SimpleNamespace()


@pytest.mark.parametrize("is_swizzled", [False, True])
def test_mxfp8(is_swizzled: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 160) * torch.logspace(-3, 3, 160)
    out, quantizer = mxfp8(96, 160, is_swizzled)
    TABLE["quantize"](out, x, quantizer)
    for row, column in ((0, 0), (31, 32), (32, 31), (95, 159), (50, 100)):
        top, left = row // 32 * 32, column // 32 * 32
        exponents = [
            127 + math.ceil(math.log2(block.abs().max().item() / 448))
            for block in (x[row, left : left + 32], x[top : top + 32, column])
        ]
        if not is_swizzled:
            assert out._rowwise_scale_inv[row, column // 32] == exponents[0]
            assert out._columnwise_scale_inv[row // 32, column] == exponents[1]
        numbers = table_of("kFloat8E4M3")
        for data, exponent in zip((out._rowwise_data, out._columnwise_data), exponents, strict=True):
            assert data[row, column] == nearest(x[row, column].item() * 2.0 ** (127 - exponent), numbers)
    assert_near(quantization.operand(out, True), x)
    assert_near(quantization.operand(out, False), x)
    if is_swizzled:
        plain, _ = mxfp8(96, 160, False)
        TABLE["quantize"](plain, x, quantizer)
        assert not torch.equal(out._rowwise_scale_inv, plain._rowwise_scale_inv)
        for is_rowwise in (True, False):
            assert torch.equal(quantization.operand(out, is_rowwise), quantization.operand(plain, is_rowwise))


def test_products_read_the_copy_that_the_hardware_would() -> None:
    """The weight's gradient reads columnwise data of both operands: a stale one is seen."""
    torch.manual_seed(0)
    x, grad = torch.randn(64, 32), torch.randn(64, 48)
    (a, quantizer), (b, _) = tensorwise(64, 32, **CURRENT), tensorwise(64, 48, **CURRENT)
    TABLE["quantize"](a, x, quantizer)
    TABLE["quantize"](b, grad, quantizer)
    values = [quantization.operand(tensor, True) for tensor in (a, b)]
    assert torch.allclose(product(a, False, b, True), values[1].T @ values[0])
    a._data.zero_()
    assert torch.allclose(product(a, False, b, True), values[1].T @ values[0])
    a._transpose.zero_()
    assert product(a, False, b, True).eq(0).all()
    a._transpose_invalid = True
    with pytest.raises(ValueError, match="lacks its columnwise data"):
        product(a, False, b, True)


def test_parts_of_masters_become_blockwise_weights() -> None:
    """A rank of the distributed optimizer has a flat part of a weight."""
    torch.manual_seed(0)
    weight, start, end = torch.randn(130, 140), 1000, 9000
    flat = weight.flatten()
    amax, out = torch.empty(2, 2), torch.zeros(8000, dtype=torch.uint8)
    TABLE["fp8_block_scaling_compute_partial_amax"](None, flat[start:end], amax, 130, 140, start, 128)
    index = torch.arange(130 * 140).view(130, 140)
    part = weight * ((index >= start) & (index < end))
    assert amax.tolist() == [
        [part[r:, c:][:128, :128].abs().max().item() for c in (0, 128)] for r in (0, 128)
    ]
    scales = torch.tensor([[2.0, 4.0], [8.0, 16.0]])
    TABLE["fp8_block_scaling_partial_cast"](None, flat[start:end], out, scales, 130, 140, start, 128, E4M3)
    factor = torch.where(index // 140 < 128, 2.0, 8.0) * torch.where(index % 140 < 128, 1.0, 2.0)
    assert torch.equal(out, fp8.cast((weight * factor).flatten()[start:end], torch.float8_e4m3fn))
    scale, inverse, value = torch.empty(1), torch.empty(1), torch.empty(1)
    TABLE["compute_amax"](None, weight, value)
    assert value.item() == weight.abs().max()
    lists = [[value], [scale], [inverse]]
    TABLE["multi_tensor_compute_scale_and_scale_inv"](None, 65536, None, lists, 448.0, True, 0.0)
    assert scale.item() == block_scale(weight) and inverse.item() == 1 / scale.item()


def test_several_tensors_are_quantized_each_with_its_scale() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4), 100 * torch.randn(2, 4)]
    outs = [tensorwise(len(tensor), 4, **CURRENT) for tensor in tensors]
    TABLE["multi_tensor_quantize"]([out for out, _ in outs], tensors, [quantizer for _, quantizer in outs])
    for (out, _), tensor in zip(outs, tensors, strict=True):
        values = torch.empty(tensor.shape)
        TABLE["dequantize"](values, out, None)
        assert out._scale_inv.item() == pytest.approx(tensor.abs().max().item() / 448)
        assert ((values - tensor).abs() <= tensor.abs() / 16 + 2.0**-10 * out._scale_inv).all()


def test_parts_and_biases() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 4)
    outs = [tensorwise(n, 4, **CURRENT) for n in (2, 0, 3)]
    TABLE["split_quantize"]([out for out, _ in outs], x, [2, 0, 3], [quantizer for _, quantizer in outs])
    for (out, quantizer), part in zip(outs, (x[:2], x[:0], x[2:5]), strict=True):
        alone, _ = tensorwise(len(part), 4, **CURRENT)
        TABLE["quantize"](alone, part, quantizer)
        assert torch.equal(out._data, alone._data)
    bias, (out, quantizer) = torch.empty(4), tensorwise(7, 4, **CURRENT)
    TABLE["bgrad_quantize"]([bias, out], x, quantizer)
    assert torch.allclose(bias, x.sum(0)) and out._scale_inv.item() == (x.abs().max() / 448).item()


def test_bytes_change_their_order() -> None:
    data = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    turned, swapped = torch.empty(4, 2, 3, dtype=torch.uint8), torch.empty(3, 2, 4, dtype=torch.uint8)
    TABLE["fp8_transpose"](turned, data, E4M3, out=None)
    assert torch.equal(turned, data.permute(2, 0, 1))
    TABLE["swap_first_dims"](swapped, data, out=None)
    assert torch.equal(swapped, data.transpose(0, 1))
