"""The table of built-in rewards, by the name of a component."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple


def check_installed() -> None:
    """Raises ValueError, with a remedy, if the package reasoning-gym is missing."""
    if find_spec("reasoning_gym") is None:
        raise ValueError(
            "the package reasoning-gym is not installed: pip install 'megatron-gvpo[reasoning-gym]'"
        )


COUNT = "megatron_gvpo.rewards.conversation_rewards:count"  # the reward is one of a conversation's counts


class BuiltIn(NamedTuple):
    """A reward that comes with the package; `function` names it, so that it is imported only where used."""

    function: str
    needs_answer: bool = False  # the reward compares with `prompt.answer`
    pays_turns: bool = False  # the reward sums an environment's rewards for the turns
    check: Callable[[], None] = lambda: None  # raises ValueError, with a remedy, for a missing package


BUILT_IN = {
    "math": BuiltIn("megatron_gvpo.rewards.math_answer:verify_math", needs_answer=True),
    "format": BuiltIn("megatron_gvpo.rewards.math_format:verify_format"),
    "reasoning_gym": BuiltIn("megatron_gvpo.rewards.math_answer:score_generated", check=check_installed),
    "environment": BuiltIn("megatron_gvpo.rewards.conversation_rewards:environment_reward", pays_turns=True),
}


def check_built_in(name: str) -> None:
    """Raises ValueError for a name that no built-in reward has."""
    if name not in BUILT_IN:
        raise ValueError(
            f"there is no built-in reward {name!r} (there are: {', '.join(sorted(BUILT_IN))}); for your own, "
            "give its function"
        )
