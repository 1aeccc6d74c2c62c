"""Functions of the user's own, by name: "module:function" or "path/file.py:function"."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


@cache
def load_function(spec: str) -> Callable[..., Any]:
    """The function that is meant. Raises ValueError that says what is missing."""
    source, name = _parts(spec)
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
    """What can be told without running it: raises ValueError where a file is missing or is no Python."""
    source, _ = _parts(spec)
    if source.endswith(".py"):
        try:
            ast.parse(Path(source).read_bytes(), source)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"importing {source} failed: {type(error).__name__}: {error}") from None


def _parts(spec: str) -> tuple[str, str]:
    """Module or file, and name. Raises ValueError for no such thing, and for a file that is missing."""
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
    """What a function raised, and in which line, for those who only read a message."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}, line {frame.lineno})"


def _load_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"user_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # true of every name that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, among others, look their module up
    spec.loader.exec_module(module)
    return module
