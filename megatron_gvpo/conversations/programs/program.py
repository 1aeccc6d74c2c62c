"""The user's agent program: what it is given, and what it may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from megatron_gvpo.conversations.environment import NoAnswer, Reply, checked
from megatron_gvpo.real_number import NoNumberError, real_number
from megatron_gvpo.runtime.user_functions import check_call, load_function


class Endpoint(NamedTuple):
    """Where a program asks the policy: arguments of an OpenAI client. The key is good for one rollout.

    The members of a group have the same `seed`, for what else the program draws.
    """

    base_url: str
    api_key: str
    seed: int = 0


def load_program(spec: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that `spec` names, with its options bound. Raises ValueError that says what is wrong."""
    found = load_function(spec)
    check_program(found, options)
    return partial(found, **options)


def check_program(found: Any, options: Mapping[str, Any]) -> None:
    """Raises ValueError for a function that is no program, or cannot be called with these options."""
    if inspect.isclass(found):
        raise ValueError("it is a class; a program is a function run(prompt, endpoint)")
    check_call(found, "run(prompt, endpoint)", 2, dict(options))


def ended(value: Any) -> tuple[float, dict[str, float]]:
    """(reward, counts) of what a program returned: a number, a Reply or None. Raises NoAnswer."""
    if isinstance(value, Reply) and value.says is not None:
        raise NoAnswer("a program's Reply has a reward and counts; `says` must be None")
    try:
        reply = value if isinstance(value, Reply) else Reply(None, real_number(value or 0.0))
    except NoNumberError:
        raise NoAnswer(
            f"the program returned {type(value).__name__} {str(value)[:60]!r}: want the reward as a number, "
            "a Reply or None"
        ) from None
    _, reward, counts = checked(reply)
    return reward, counts
