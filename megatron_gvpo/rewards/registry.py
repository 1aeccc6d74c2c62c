"""The reward components: the built-in ones, and the functions that configurations name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from megatron_gvpo.runtime.user_functions import check_call, load_function

COUNT = "megatron_gvpo.rewards.counted:count"  # reads one of a conversation's counts


class BuiltIn(NamedTuple):
    """A reward that comes with the package; `function` names it, so that it is imported only where used."""

    function: str
    needs_answer: bool = False  # it compares with `prompt.answer`


BUILT_IN = {
    "math": BuiltIn("megatron_gvpo.rewards.math_answer:verify_math", needs_answer=True),
    "format": BuiltIn("megatron_gvpo.rewards.boxed:verify_format"),
    "reasoning_gym": BuiltIn("megatron_gvpo.rewards.generated:score_generated"),
    "environment": BuiltIn("megatron_gvpo.rewards.counted:environment_reward"),
}


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
