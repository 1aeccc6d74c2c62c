"""Reward components: from their configuration to the functions they mean, and one evaluation of one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.rewards.verifiers import BUILT_IN


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
    spec = component.function
    if spec is None:
        if component.name not in BUILT_IN:
            known = ", ".join(sorted(BUILT_IN))
            raise ValueError(f"no such built-in reward (there are: {known}); for your own, give its function")
        function = BUILT_IN[component.name]
    else:
        function = _load_user_function(spec)
    try:
        inspect.signature(function).bind("prompt", "response", **component.options)
    except TypeError as error:
        raise ValueError(
            f"it is called as f(prompt, response, **options) with options {dict(component.options)}: {error}"
        ) from None
    return partial(function, **component.options)


def _load_user_function(spec: str) -> Callable[..., Any]:
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ValueError("expected module:function or path/file.py:function")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError:
        raise ValueError(f"there is no file {source}") from None
    except Exception as error:
        raise ValueError(f"importing {source} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"{source} has no function {name!r}; it has: {', '.join(there) or 'none'}")
    return function


def _load_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None  # true of every name that ends with .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
