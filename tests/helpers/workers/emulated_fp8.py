"""Rank function of test_emulated_fp8.py: gradients in FP8, what the products read, and deliberate faults."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from helpers.workers.emulated_faults import NO_FAULT, Faults, Result, _calls, changed, updated
from helpers.workers.gradient_worker import Case, Layout, config_of

Operands = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Fp8Result:
    """An update's gradients, and the operands of its products in FP8, in their order."""

    result: Result
    operands: Operands


@contextlib.contextmanager
def recorded() -> Iterator[Operands]:
    """The operands that products read inside, dequantized: [rows, columns] in fp32."""
    from megatron_gvpo.emulation.transformer_engine import gemm
    from megatron_gvpo.emulation.transformer_engine.quantization import operand
    from megatron_gvpo.emulation.transformer_engine.references import is_plain

    operands: Operands = []
    product = gemm.product

    def call(a: Any, trans_a: bool, b: Any, trans_b: bool) -> Tensor:
        if not is_plain(a):
            operands.append((operand(b, not trans_b).clone(), operand(a, trans_a).clone()))
        return product(a, trans_a, b, trans_b)

    with mock.patch.object(gemm, "product", call):
        yield operands


def _other_quantizer(change: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, tensors are quantized by a changed copy of their quantizer."""

    def copied(args: list[Any], options: dict[str, Any]) -> None:
        quantizer = args[1].copy()
        if change(quantizer):
            args[1] = quantizer

    return changed("quantize", copied)


def _other_kind_of_scales(quantizer: Any) -> bool:
    quantizer.force_pow_2_scales = not quantizer.force_pow_2_scales
    return True


def _gradients_in_e4m3(quantizer: Any) -> bool:
    import transformer_engine_torch as extension

    is_of_gradient = quantizer.dtype == extension.DType.kFloat8E5M2
    quantizer.dtype = extension.DType.kFloat8E4M3
    return is_of_gradient


def _in_e5m2(quantizer: Any) -> bool:
    import transformer_engine_torch as extension

    quantizer.dtype = extension.DType.kFloat8E5M2
    return True


@contextlib.contextmanager
def _around_writes(change: Callable[..., None]) -> Iterator[None]:
    """Inside, `change` gets the function that quantizes, the quantized tensor, and the other arguments."""
    from megatron_gvpo.emulation.transformer_engine import quantization

    with contextlib.ExitStack() as stack:
        for name in ("_write_tensorwise", "_write_blockwise", "_write_mxfp8"):
            call = functools.partial(change, getattr(quantization, name))
            stack.enter_context(mock.patch.object(quantization, name, call))
        yield


def _other_data(
    change: Callable[[Any], None], only: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Inside, a tensor is changed after it was quantized: all of them, or number `only`."""
    numbers = itertools.count(1)

    def call(write: Callable[..., None], out: Any, *args: Any) -> None:
        write(out, *args)
        if only in (None, next(numbers)):
            _calls.append("write")
            change(out)

    return _around_writes(call)


def _double_scales(out: Any) -> None:
    from megatron_gvpo.rehearsal.nullcuda.aliases import alias

    for name in ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv"):
        if (scale := getattr(out, name, None)) is not None:
            values = alias(scale)
            values.add_(1) if values.dtype == torch.uint8 else values.mul_(2)


def _turn_columns(out: Any) -> None:
    from megatron_gvpo.rehearsal.nullcuda.aliases import alias

    data = getattr(out, "_transpose", getattr(out, "_columnwise_data", None))
    if data is not None:
        values = alias(data)
        values.copy_(values.roll(1, 0))


@contextlib.contextmanager
def _stale_amax() -> Iterator[None]:
    """The scale of a tensor is that of the one before it of its shape: of the layer before."""
    from megatron_gvpo.emulation.transformer_engine import fp8

    last: dict[Any, Tensor] = {}
    shape: tuple[Any, ...] = ()

    def call(write: Callable[..., None], out: Any, values: Tensor, *args: Any) -> None:
        nonlocal shape
        shape = (str(out._fp8_dtype), *values.shape)
        write(out, values, *args)

    def stale(function: Callable[..., Tensor], amax: Tensor, *args: Any) -> Tensor:
        key = (*shape, *amax.shape)
        before, last[key] = last.get(key, amax), amax.clone()
        _calls.append("amax")
        return function(before, *args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_around_writes(call))
        for name in ("scale_of", "e8m0_of"):
            of_stale = functools.partial(stale, getattr(fp8, name))
            stack.enter_context(mock.patch.object(fp8, name, of_stale))
        yield


_EVERYWHERE: Faults = {
    "a scale off by 2": lambda: _other_data(_double_scales, only=3),
    "columns of another token": lambda: _other_data(_turn_columns),
    "a stale amax": _stale_amax,
}
FAULTS: dict[str, Faults] = {
    "tensorwise": {
        **_EVERYWHERE,
        "gradients in e4m3": lambda: _other_quantizer(_gradients_in_e4m3),
        "scales that are powers of two": lambda: _other_quantizer(_other_kind_of_scales),
    },
    "blockwise": {
        **_EVERYWHERE,
        "operands in e5m2": lambda: _other_quantizer(_in_e5m2),
        "scales that are not powers of two": lambda: _other_quantizer(_other_kind_of_scales),
    },
    "mxfp8": {**_EVERYWHERE, "operands in e5m2": lambda: _other_quantizer(_in_e5m2)},
}


def run(directory: str) -> None:
    """Write results.pt: {(recipe, dtype, fault): Fp8Result}. work.pt: [(case, faults)]."""
    from megatron.core import parallel_state

    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    runs: list[tuple[Case, list[str]]] = torch.load(folder / "work.pt", weights_only=False)
    results: dict[tuple[str, str, str], Fp8Result] = {}
    for case, faults in runs:
        assert case.fp8 is not None
        config = config_of(case, Layout(1), folder)
        policy = Policy.of(config)
        for name in faults:
            print(f"{case.fp8}, {case.dtype}: {name}", flush=True)
            with recorded() as operands:
                result = updated({"nothing": NO_FAULT, **FAULTS[case.fp8]}[name], policy, case, config)
            results[case.fp8, case.dtype, name] = Fp8Result(result, operands)
        parallel_state.destroy_model_parallel()
    torch.save(results, folder / "results.pt")
