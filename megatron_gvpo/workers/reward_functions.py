"""The reward components: the built-in ones, and the functions that configurations name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from megatron_gvpo.core.user_functions import check_call, load_function
from megatron_gvpo.settings.built_in_rewards import BUILT_IN


class Component(NamedTuple):
    """One component of the reward, as it is sent to a worker."""

    name: str
    function: str | None  # "module:function" or "path/file.py:function"; None: built in under `name`
    options: Mapping[str, Any]
    place: int = 0  # in rewards.components


def load_reward(component: Component) -> Callable[..., Any]:
    """The component's function with its options bound. Raises ValueError that says what is missing."""
    function = load_function(component.function or BUILT_IN[component.name].function)
    check_reward(function, component.options)
    return partial(function, **component.options)


def check_reward(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ValueError for a function that cannot be called as a reward with these options."""
    check_call(function, "f(prompt, rollout, **options)", 2, dict(options))
