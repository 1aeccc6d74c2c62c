"""Runs Triton's kernels in Triton's interpreter, over the tensors' own memory, and corrects the interpreter.

Kernels that permute the tokens of experts have references instead, because the interpreter needs minutes for
them. The interpreter of Triton 3.7 truncates numbers that it casts to bf16, and it adds and multiplies the
bits of bf16 numbers as integers; this module makes it round and compute as a GPU does. The counter of a loop
is a Python integer, which cannot be cast; here it can, because kernels of gated delta nets cast it.

TRITON_INTERPRET=1 must be set before Triton is imported. The autotuner takes its first configuration, since
the times of interpreted kernels say nothing about a GPU.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_gvpo.emulation.transformer_engine import permutation
from megatron_gvpo.rehearsal import stand_ins
from megatron_gvpo.rehearsal.nullcuda.aliases import aliases


def install() -> None:
    """Prepare the interpreter for every kernel that is called from now on."""
    from triton.runtime import interpreter

    stand_ins.take_first_configuration()
    # With this check the interpreter computes every sum and product of integers twice, to detect overflows.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    call, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    replaced: list[set[int]] = []  # ids of the modules whose functions are replaced, for each running kernel

    def modules(function: Any) -> set[int]:
        language = interpreter.tl
        return {id(v) for v in function.__globals__.values() if v is language or v is language.core}

    def patch_once(function: Any) -> Any:
        """Replace triton.language's functions once a kernel; the interpreter does so at each inner call."""
        if replaced and modules(function) <= replaced[-1]:
            return interpreter._LangPatchScope()
        if replaced:  # replacements for a called function stay until the kernel ends
            replaced[-1] |= modules(function)
        return patch(function)

    @functools.wraps(call)
    def on_aliases(self: Any, *args: Any, **options: Any) -> None:
        """Run a kernel on CPU aliases of its tensors; the interpreter would copy whole storages instead."""
        if self.fn.__module__ == permutation.MODULE and self.fn.__name__ in permutation.KERNELS:
            _by_reference(self, args, options)
            return
        scope = patch_once(self.fn)
        scope.set_attr(sys.modules[self.fn.__module__], "range", _steps)
        replaced.append(modules(self.fn))
        try:
            call(self, *map(_on_host, args), **{name: _on_host(value) for name, value in options.items()})
        finally:
            replaced.pop()
            scope.restore()

    for name in ("binary_op", "unary_op", "create_fma", "create_dot"):
        method = getattr(interpreter.InterpreterBuilder, name)
        setattr(interpreter.InterpreterBuilder, name, _of_bf16(method, interpreter))
    interpreter._convert_float = _rounded(interpreter._convert_float, interpreter)
    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = on_aliases


def _rounded(convert: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    """Wrap the interpreter's conversion of floats so that it rounds fp32 to bf16, and does not truncate."""

    @functools.wraps(convert)
    def converted(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        is_nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if (source.name, target.name) == ("fp32", "bf16") and is_nearest:
            return to_bf16(values)
        return convert(values, source, target, rounding_mode)

    return converted


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest bf16, ties to even, and return the bits."""
    bits = values.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)


def _of_bf16(method: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    """Wrap an operation of the interpreter so that it computes in fp32 where an operand is bf16.

    The result is rounded to bf16 if all operands are bf16. The sum of a matrix product stays in fp32.
    """
    handle, bf16, fp32 = interpreter.TensorHandle, interpreter.tl.bfloat16, interpreter.tl.float32

    def is_bf16(operand: Any) -> bool:
        return bool(operand.dtype.scalar == bf16)

    def wide(operand: Any) -> Any:
        if not isinstance(operand, handle) or not is_bf16(operand):
            return operand
        return handle((operand.data.astype(np.uint32) << 16).view(np.float32), fp32)

    @functools.wraps(method)
    def computed(self: Any, *arguments: Any) -> Any:
        operands = [argument for argument in arguments if isinstance(argument, handle)]
        if not any(map(is_bf16, operands)):
            return method(self, *arguments)
        result = method(self, *map(wide, arguments))
        if result.data.dtype != np.float32 or not all(map(is_bf16, operands)):  # not float32: a comparison
            return result
        return handle(to_bf16(result.data), bf16)

    return computed


def _by_reference(executor: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    names = inspect.getfullargspec(executor.fn).args
    known = {name: aliases(value) for name, value in options.items() if name in names}
    arguments = inspect.getcallargs(executor.fn, *map(aliases, args), **known)
    grid = executor.grid(arguments) if callable(executor.grid) else executor.grid
    permutation.KERNELS[executor.fn.__name__](grid[0], SimpleNamespace(**arguments))


class _Step(int):
    """The counter of a loop. A cast returns it unchanged, since the interpreter accepts it as any type."""

    def to(self, dtype: Any) -> _Step:
        return self


def _steps(*bounds: Any) -> Iterator[_Step]:
    return map(_Step, range(*bounds))


def _on_host(argument: Any) -> Any:
    return argument if callable(argument) else aliases(argument)
