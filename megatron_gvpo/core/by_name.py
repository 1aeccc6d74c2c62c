"""Tables of classes by name, as "module:class": a configuration can name one before torch is loaded."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def load_class(path: str) -> Any:
    """The class at `path`, "module:class". Imports its module, which may load torch."""
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
    ends. The collector would look through all of them several times while they are being made.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
