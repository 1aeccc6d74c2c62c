"""Triton's kernels run in Triton's interpreter, over the tensors' own memory.

TRITON_INTERPRET=1 must be set before Triton is imported. The autotuner takes its first configuration:
to time kernels here would say nothing.
"""

from __future__ import annotations

import functools
from typing import Any

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
        scope = patch_once(self.fn)
        replaced.append(modules(self.fn))
        try:
            call(self, *map(_on_host, args), **{name: _on_host(value) for name, value in options.items()})
        finally:
            replaced.pop()
            scope.restore()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = on_aliases


def _on_host(argument: Any) -> Any:
    return argument if callable(argument) else aliases(argument)
