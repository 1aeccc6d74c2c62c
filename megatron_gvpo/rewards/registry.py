"""The reward components: the built-in ones, and the functions that configurations name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from megatron_gvpo.data.generated import check_installed
from megatron_gvpo.runtime.user_functions import check_call, load_function

COUNT = "megatron_gvpo.rewards.counted:count"  # reads one of a conversation's counts


class BuiltIn(NamedTuple):
    """A reward that comes with the package; `function` names it, so that it is imported only where used."""

    function: str
    needs_answer: bool = False  # it compares with `prompt.answer`
    pays_turns: bool = False  # it sums what the environment of a conversation gave for its turns
    check: Callable[[], None] = lambda: None  # raises ValueError, with a remedy, for a missing package


BUILT_IN = {
    "math": BuiltIn("megatron_gvpo.rewards.math_answer:verify_math", needs_answer=True),
    "format": BuiltIn("megatron_gvpo.rewards.boxed:verify_format"),
    "reasoning_gym": BuiltIn("megatron_gvpo.rewards.generated:score_generated", check=check_installed),
    "environment": BuiltIn("megatron_gvpo.rewards.counted:environment_reward", pays_turns=True),
}


def check_built_in(name: str) -> None:
    """Raises ValueError for a name that no built-in reward has."""
    if name not in BUILT_IN:
        raise ValueError(
            f"there is no built-in reward {name!r} (there are: {', '.join(sorted(BUILT_IN))}); for your own, "
            "give its function"
        )


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
