"""Lets a configuration be read without loading torch, and loads large libraries when they are used.

A block of a method is its options and the function that they configure, in one class. A configuration needs
the options only, so `recipes`, `plan` and the refusal of a wrong configuration do not wait for torch. Modules
that a configuration imports take `torch` from here, and `Tensor` under TYPE_CHECKING;
tests/cli/test_startup.py fails if one does not. Tables name classes as "module:class" for the same reason.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """torch, imported at the first use of its attributes."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()


def load_class(path: str) -> Any:
    """The class at `path`, "module:class". The function imports the class's module, which may load torch."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def known(table: Mapping[str, object], name: str) -> str:
    """Returns a known name, a key of `table`. Raises ValueError, which lists the keys, for any other."""
    if name not in table:
        *others, last = map(repr, table)
        raise ValueError(f"Input should be {', '.join(others)} or {last}")  # pydantic's wording for a Literal
    return name


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Run imports of large libraries without garbage collection, a fifth faster.

    Torch, Megatron and transformers make about a million objects, nearly all of which live until the process
    ends. The collector would search all of them several times during the import.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
