"""Imports single files of an engine's package from its own environment, which is for another Python.

The emulated GPU needs torch's CUDA build, and the engines' environments have torch for CPUs and compiled
packages that this Python cannot load. So an engine's files that a test names are the real ones, and whatever
else they import from the engine, or from packages that only its environment has, is a stand-in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class EngineFiles(MetaPathFinder, Loader):
    """Finds `files`, modules of `package`, in `site`; put it at the end of sys.meta_path."""

    def __init__(self, site: str, package: str, files: Sequence[str]) -> None:
        self._site, self._package, self._files = site, package, frozenset(files)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        top, _, rest = name.partition(".")
        if name in self._files:
            return PathFinder.find_spec(name, [f"{self._site}/{name.rpartition('.')[0].replace('.', '/')}"])
        if rest and not isinstance(sys.modules[top], StandIn):
            return None
        if PathFinder.find_spec(top, [self._site]) is None:  # the engine's environment lacks the package, too
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because a stand-in has no code."""


class StandIn(ModuleType):
    """A module in which every name is a class that can be derived from, called and annotated with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnythingMeta(name, (Anything,), {})


class _AnythingMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_AnythingMeta):
    """A value that is false; as a decorator it returns its argument."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __init_subclass__(cls, **options: Any) -> None:
        pass

    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else Anything()

    def __bool__(self) -> bool:
        return False
