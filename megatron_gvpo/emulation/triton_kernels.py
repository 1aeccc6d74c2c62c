"""Triton's kernels run in Triton's interpreter, over the tensors' own memory.

Those that permute the tokens of experts have references, because the interpreter takes minutes for them.
The interpreter (Triton 3.7) cuts off the digits of a number that it casts to bf16; here they are rounded, as
by a GPU.

TRITON_INTERPRET=1 must be set before Triton is imported. The autotuner takes its first configuration: to time
kernels here would say nothing.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_gvpo.emulation.transformer_engine import permutation
from megatron_gvpo.rehearsal import stand_ins
from megatron_gvpo.rehearsal.nullcuda.aliases import aliases


def install() -> None:
    """Prepare the interpreter, for every kernel that is called from now on."""
    from triton.runtime import interpreter

    stand_ins.take_first_configuration()
    # It would compute every sum and product of integers twice, to see whether 32 bits are enough.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    call, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    replaced: list[frozenset[int]] = []  # modules of triton.language, for the kernel that runs

    def modules(function: Any) -> frozenset[int]:
        language = interpreter.tl
        return frozenset(id(v) for v in function.__globals__.values() if v is language or v is language.core)

    def patch_once(function: Any) -> Any:
        """The interpreter would replace triton.language's functions in every function that a kernel calls."""
        return interpreter._LangPatchScope() if modules(function) in replaced else patch(function)

    @functools.wraps(call)
    def on_aliases(self: Any, *args: Any, **options: Any) -> None:
        """The interpreter would copy whole storages to the host and back."""
        if self.fn.__module__ == permutation.MODULE and self.fn.__name__ in permutation.KERNELS:
            _by_reference(self, args, options)
            return
        scope = patch_once(self.fn)
        replaced.append(modules(self.fn))
        try:
            call(self, *map(_on_host, args), **{name: _on_host(value) for name, value in options.items()})
        finally:
            replaced.pop()
            scope.restore()

    convert = interpreter._convert_float

    @functools.wraps(convert)
    def rounded(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        is_nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if (source.name, target.name) == ("fp32", "bf16") and is_nearest:
            return to_bf16(values)
        return convert(values, source, target, rounding_mode)

    interpreter._convert_float = rounded
    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = on_aliases


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bf16 numbers, of two the one whose last bit is 0."""
    bits = values.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)


def _by_reference(executor: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    names = inspect.getfullargspec(executor.fn).args
    known = {name: aliases(value) for name, value in options.items() if name in names}
    arguments = inspect.getcallargs(executor.fn, *map(aliases, args), **known)
    grid = executor.grid(arguments) if callable(executor.grid) else executor.grid
    permutation.KERNELS[executor.fn.__name__](grid[0], SimpleNamespace(**arguments))


def _on_host(argument: Any) -> Any:
    return argument if callable(argument) else aliases(argument)
