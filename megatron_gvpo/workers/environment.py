"""The other side of a conversation: what a user's class must have, and what it may answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from megatron_gvpo.core.metric_names import check_name, own_names
from megatron_gvpo.core.real_number import NoNumberError, real_number
from megatron_gvpo.core.user_functions import load_function
from megatron_gvpo.groups import Prompt, utf8

Messages = list[dict[str, Any]]

# What the run itself counts in conversations, and other metrics that begin with env/.
TAKEN = own_names("env/<count>") | {
    *("environment_reward", "observation_tokens", "observations_dropped"),
    *("overridden_calls", "retried_calls"),
}


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


class NoAnswer(ValueError):  # noqa: N818
    """The user's code returned a wrong value; the message has no line of this package."""


class Outage(Exception):  # noqa: N818
    """A tool raises it where something that it needs is down, which is not the policy's doing.

    The step is tried once more, and then the conversation leaves its group.
    """


class Environment(Protocol):
    """An environment. Every conversation has an object of its own, made with the configured options.

    Either method may be `async`; conversations whose `step` is async overlap in their process, and others
    take turns. What it says must depend on the prompt, the seed and the policy's turns
    alone: a conversation whose worker was lost is repeated up to the turn where it was, and a resumed run
    asks again. An exception is a failure of the environment, not of the policy: the step is tried once more,
    and then the conversation leaves its group. What the policy did wrong, an environment says.

    An environment that holds something, such as a container, may have a third method, `close()`, plain or
    async, which is called when its conversation has ended or has failed there; not where its process has.
    """

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Begin. All conversations of a group have the same prompt and seed."""

    def step(self, said: str) -> Reply | str | Sequence[Mapping[str, Any]] | None:
        """Answer what the policy said in its turn, end token excluded. A plain value is a Reply's `says`."""


def load_environment(spec: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """The class that `spec` names, with its options bound. Raises ValueError that says what is missing."""
    found = load_function(spec)
    check_environment(found, options)
    made: Any = partial(found, **options)
    return made


def check_environment(found: Any, options: Mapping[str, Any]) -> None:
    """Raises ValueError for a class that is no environment, or cannot be made with these options."""
    missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
    if not inspect.isclass(found) or missing:
        lacks = f"lacks {' and '.join(missing)}" if missing else "is a function"
        raise ValueError(f"it {lacks}; an environment is a class with reset(prompt, seed) and step(said)")
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ValueError(f"it cannot be made with the options {dict(options)}: {error}") from None
    for name, arguments in (("reset", ("prompt", "seed")), ("step", ("said",))):
        if inspect.isfunction(method := inspect.getattr_static(found, name)):
            try:
                inspect.signature(method).bind("self", *arguments)
            except TypeError as error:
                called = f"{name}({', '.join(arguments)})"
                raise ValueError(f"{name} does not take what it is called with, {called}: {error}") from None


def overlaps(make: Callable[[], Environment]) -> bool:
    """True if steps of several conversations may run at once in one event loop: none computes or blocks.

    An environment may say so itself, by a function `overlaps` of its options.
    """
    assert isinstance(make, partial)
    kind: Any = make.func
    says = getattr(kind, "overlaps", None)
    return inspect.iscoroutinefunction(kind.step) if says is None else says(**make.keywords)


def checked(answer: Any) -> tuple[Messages | None, float, dict[str, float]]:
    """(messages or None, reward, counts) of what `step` returned. Raises NoAnswer for any other value."""
    says, reward, counts = answer if isinstance(answer, Reply) else (answer, 0.0, {})
    if not isinstance(counts, Mapping):
        raise NoAnswer(f"step returned {type(counts).__name__} as its counts: want a mapping of names")
    paid = _number(reward, "its reward")
    counted = {_free(str(name)): _number(number, f"the count {name}") for name, number in counts.items()}
    if says is None:
        return None, paid, counted
    messages = [{"role": "user", "content": says}] if isinstance(says, str) else says
    if not isinstance(messages, Sequence) or not messages or not all(map(_is_message, messages)):
        raise NoAnswer(
            f"step returned {type(says).__name__} {str(says)[:60]!r}: want a text, a list of chat messages, "
            "None or a Reply"
        )
    return [{k: utf8(v) if isinstance(v, str) else v for k, v in m.items()} for m in messages], paid, counted


def _free(name: str) -> str:
    """The name of a count, which is also that of a metric. Raises NoAnswer for another's."""
    try:
        check_name(name, TAKEN)
    except ValueError as problem:
        raise NoAnswer(f"step returned a count with {problem}") from None
    return name


def _number(value: Any, what: str) -> float:
    try:
        return real_number(value)
    except NoNumberError as error:
        raise NoAnswer(f"step returned {error} as {what}") from None


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )
