"""Reward components: from their configuration to the functions they mean, and one evaluation of one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_gvpo.groups import Prompt, Rollout

# Named like a user's own, so that only what a run uses is imported.
BUILT_IN = {
    "math": "megatron_gvpo.rewards.math_answer:verify_math",
    "format": "megatron_gvpo.rewards.boxed:verify_format",
}


class Component(NamedTuple):
    """One component of the reward, as a worker needs it."""

    name: str
    function: str | None  # "module:function" or "path/file.py:function"; None: built in under `name`
    options: Mapping[str, Any]


class Job(NamedTuple):
    """One evaluation of one component (its index)."""

    component: int
    prompt: Prompt
    rollout: Rollout


def load_reward(component: Component) -> Callable[..., Any]:
    """The component's function with its options bound. Raises ValueError that says what is missing."""
    spec = component.function or BUILT_IN.get(component.name)
    if spec is None:
        known = ", ".join(sorted(BUILT_IN))
        raise ValueError(f"no such built-in reward (there are: {known}); for your own, give its function")
    function = _load_function(spec)
    try:
        inspect.signature(function).bind("prompt", "response", **component.options)
    except TypeError as error:
        raise ValueError(
            f"it is called as f(prompt, response, **options) with options {dict(component.options)}: {error}"
        ) from None
    return partial(function, **component.options)


def _load_function(spec: str) -> Callable[..., Any]:
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ValueError("expected module:function or path/file.py:function")
    is_file = source.endswith(".py")
    if is_file and not Path(source).is_file():
        raise ValueError(f"there is no file {source}")
    try:
        module = _load_file(Path(source)) if is_file else importlib.import_module(source)
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
    return function


def _load_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"user_reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # true of every name that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, among others, look their module up
    spec.loader.exec_module(module)
    return module
