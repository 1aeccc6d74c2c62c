"""`import torch` that costs nothing until torch is used, for commands that may never use it.

`from torch import Tensor` is a use, so the modules that a configuration imports have it under TYPE_CHECKING.
tests/cli/test_startup.py fails if one forgets.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def defer(name: str) -> None:
    """Let `import NAME` load nothing in this process until an attribute or a submodule of NAME is used.

    With `importlib.util.LazyLoader` the second `import NAME` would load it.
    """
    if name not in sys.modules and (spec := find_spec(name)) is not None:
        module = _Deferred(name)
        module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
        sys.modules[name] = module


class _Deferred(ModuleType):
    """A module that is executed, in place, when a name is read that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]  # from here on a module as any other
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        return getattr(self, name)
