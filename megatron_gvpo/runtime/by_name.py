"""Tables of classes by name, as "module:class", so that a configuration may ask for names without torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def load_class(table: Mapping[str, str], name: str) -> Any:
    """The class under `name`, a key of `table`. Imports its module, which may load torch."""
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def known(table: Mapping[str, str], name: str) -> str:
    """Returns a known name, a key of `table`. Raises ValueError, which lists the keys, for any other."""
    if name not in table:
        *others, last = map(repr, table)
        raise ValueError(f"Input should be {', '.join(others)} or {last}")  # as pydantic's for a Literal
    return name
