"""Users' own functions, named as "module:function" or "path/file.py:function"."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

# Modules whose functions a configuration may name, by their former names, which work for one more release.
MOVED = {"megatron_gvpo.algorithms.judged": "megatron_gvpo.algorithms.shapers.judged"}


@cache
def load_function(spec: str) -> Callable[..., Any]:
    """The function that `spec` names. Raises ValueError that says what is missing."""
    source, name = _parts(spec)
    if source in MOVED:
        now = f"{MOVED[source]}:{name}"
        warnings.warn(f"{spec} is now {now}: the old name goes away soon", FutureWarning, stacklevel=2)
        return load_function(now)
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        raise ValueError(f"importing {source} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [
            key
            for key, f in inspect.getmembers(module, inspect.isfunction)
            if f.__module__ == module.__name__
        ]
        raise ValueError(f"{source} has no function {name!r}; it has: {', '.join(there) or 'none'}")
    checked: Callable[..., Any] = function
    return checked


def check_source(spec: str) -> None:
    """Raises ValueError for a file that is missing or is no Python, without running it."""
    source, _ = _parts(spec)
    if source.endswith(".py"):
        try:
            ast.parse(Path(source).read_bytes(), source)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"importing {source} failed: {type(error).__name__}: {error}") from None


def _parts(spec: str) -> tuple[str, str]:
    """Module or file, and function. Raises ValueError for a spec without both, and for a missing file."""
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ValueError("expected module:function or path/file.py:function")
    if source.endswith(".py") and not Path(source).is_file():
        where = "" if Path(source).is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"there is no file {source}{where}")
    return source, name


def check_call(function: Callable[..., Any], shown: str, arguments: int, options: dict[str, Any]) -> None:
    """Raises ValueError where `function` cannot be called with so many arguments and these options."""
    try:
        inspect.signature(function).bind(*range(arguments), **options)
    except TypeError as error:
        raise ValueError(f"it is called as {shown} with options {options}: {error}") from None


def described(error: BaseException) -> str:
    """The error that a function raised and its line, for readers who see only the message."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}, line {frame.lineno})"


def _load_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"user_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # always so for a name that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, among others, look up their module
    spec.loader.exec_module(module)
    return module
