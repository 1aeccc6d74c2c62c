"""The other side of a conversation: what a user's class must have, and what it may answer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from megatron_gvpo.groups import Prompt
from megatron_gvpo.runtime.user_functions import load_function

Messages = list[dict[str, Any]]


class Reply(NamedTuple):
    """An environment's answer to a turn of the policy.

    `says`: a text, which becomes a message of the user, or a list of chat messages; None ends the
    conversation.
    `reward` is that of the turn which it answers (`Turn.reward`), and is added to
    `rollout.counts["environment_reward"]`; `counts` are added to the counts of these names.
    """

    says: str | Sequence[Mapping[str, Any]] | None = None
    reward: float = 0.0
    counts: Mapping[str, float] = {}


class Environment(Protocol):
    """An environment. Every conversation has an object of its own, made with the configured options.

    Either method may be `async`; conversations whose `step` is async overlap in their process, and others
    take turns. What it says must depend on the prompt, the seed and the policy's turns
    alone: a conversation whose worker was lost is repeated up to the turn where it was, and a resumed run
    asks again. An exception is a failure of the environment, not of the policy: the step is tried once more,
    and then the conversation leaves its group. What the policy did wrong, an environment says.
    """

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Begin. All conversations of a group have the same prompt and seed."""

    def step(self, said: str) -> Reply | str | Sequence[Mapping[str, Any]] | None:
        """Answer what the policy said in its turn, end token excluded. A plain value is a Reply's `says`."""


def load_environment(spec: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """The class that `spec` names, with its options bound. Raises ValueError that says what is missing."""
    found = load_function(spec)
    missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
    if not inspect.isclass(found) or missing:
        lacks = f"lacks {' and '.join(missing)}" if missing else "is a function"
        raise ValueError(f"it {lacks}; an environment is a class with reset(prompt, seed) and step(said)")
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ValueError(f"it cannot be made with the options {dict(options)}: {error}") from None
    made: Any = partial(found, **options)
    return made


def overlaps(make: Callable[[], Environment]) -> bool:
    """True if steps of several conversations may run at once in one event loop: none computes or blocks.

    An environment may say so itself, by a function `overlaps` of its options.
    """
    assert isinstance(make, partial)
    kind: Any = make.func
    says = getattr(kind, "overlaps", None)
    return inspect.iscoroutinefunction(kind.step) if says is None else says(**make.keywords)


def checked(answer: Any) -> tuple[Messages | None, float, dict[str, float]]:
    """(messages or None, reward, counts) of what `step` returned. Raises ValueError for any other value."""
    says, reward, counts = answer if isinstance(answer, Reply) else (answer, 0.0, {})
    numbers = {"environment_reward": reward, **counts}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"step returned {name}={number!r}, which is no finite number")
    counted = {str(name): float(number) for name, number in counts.items()}
    if says is None:
        return None, float(reward), counted
    messages = [{"role": "user", "content": says}] if isinstance(says, str) else says
    if not isinstance(messages, Sequence) or not messages or not all(map(_is_message, messages)):
        raise ValueError(
            f"step returned {type(says).__name__} {str(says)[:60]!r}: want a text, a list of chat messages, "
            "None or a Reply"
        )
    return [dict(message) for message in messages], float(reward), counted


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )
