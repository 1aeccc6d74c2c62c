"""The interface of environments: the methods of a user's class, and the values that they may return.

`environments.py` runs environments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from megatron_gvpo.core.metric_names import check_name, own_names
from megatron_gvpo.core.plain_values import NoNumberError, real_number
from megatron_gvpo.core.user_functions import load_function
from megatron_gvpo.groups import Prompt, utf8

Messages = list[dict[str, Any]]

# Names that a count of an environment cannot have, because other metrics have them after `env/`.
TAKEN = own_names("env/<count>") | {
    "environment_reward",
    "observation_tokens",
    "observations_dropped",
    "overridden_calls",
    "retried_calls",
}


class Reply(NamedTuple):
    """An environment's answer to a turn of the policy.

    `says` is a text, which becomes a message of the user, or a list of chat messages; None ends the
    conversation. `reward` is that of the answered turn (`Turn.reward`); it is also added to
    `rollout.counts["environment_reward"]`. `counts` are added to the rollout's counts of the same names.
    """

    says: str | Sequence[Mapping[str, Any]] | None = None
    reward: float = 0.0
    counts: Mapping[str, float] = {}


class WrongValue(ValueError):  # noqa: N818
    """The user's code returned a wrong value.

    Only the message is shown, without a traceback of this package.
    """


class Outage(Exception):  # noqa: N818
    """Raised by a tool or a program when a service that it needs is down, which is not the policy's fault.

    The step, or the program, is tried once more, and then the conversation leaves its group.
    """


class Environment(Protocol):
    """An environment. Every conversation has an object of its own, made with the configured options.

    Either method may be `async`; conversations whose `step` is async overlap in their process, and others
    take turns. The answers must depend on the prompt, the seed and the policy's turns alone: a conversation
    whose worker was lost is repeated up to its last turn, and a resumed run starts it again. An exception is
    a failure of the environment, not of the policy: the step is tried once more, and then the conversation
    leaves its group. Mistakes of the policy do not raise: the answer to the policy describes them.

    An environment with resources, such as a container, may have a third method, `close()`, plain or async. It
    is called when the conversation has ended or failed, but not if the environment's process has ended.

    A static method `prepare(**options)` is called once in each process, with the configured options, before
    the first conversation: it may start a server. A ValueError from it ends the run at its start.
    """

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Begin. All conversations of a group have the same prompt and seed."""

    def step(self, response: str) -> Reply | str | Sequence[Mapping[str, Any]] | None:
        """Answer the policy's turn, a text without end token. A plain value is taken as a Reply's `says`."""


def load_environment(spec: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """The class that `spec` names, prepared, with its options bound. Raises ValueError."""
    environment: Any = load_function(spec)
    check_environment(environment, options)
    if callable(prepare := getattr(environment, "prepare", None)):
        prepare(**options)
    return partial(environment, **options)


def check_environment(environment: Any, options: Mapping[str, Any]) -> None:
    """Raises ValueError for a class that is not an environment, or cannot be made with these options."""
    missing = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
    if not inspect.isclass(environment) or missing:
        lacks = f"lacks {' and '.join(missing)}" if missing else "is a function"
        raise ValueError(f"it {lacks}; an environment is a class with reset(prompt, seed) and step(response)")
    try:
        inspect.signature(environment).bind(**options)
    except TypeError as error:
        raise ValueError(f"it cannot be made with the options {dict(options)}: {error}") from None
    for name, arguments in (("reset", ("prompt", "seed")), ("step", ("response",))):
        if inspect.isfunction(method := inspect.getattr_static(environment, name)):
            try:
                inspect.signature(method).bind("self", *arguments)
            except TypeError as error:
                called = f"{name}({', '.join(arguments)})"
                raise ValueError(f"{name} does not take what it is called with, {called}: {error}") from None


def overlaps(make: Callable[[], Environment]) -> bool:
    """True if steps of several conversations may run at once in an event loop: none computes or blocks.

    An environment may have a static method `overlaps(**options)` that returns this.
    """
    assert isinstance(make, partial)
    environment: Any = make.func
    own = getattr(environment, "overlaps", None)
    return inspect.iscoroutinefunction(environment.step) if own is None else own(**make.keywords)


def checked_reply(answer: Any) -> tuple[Messages | None, float, dict[str, float]]:
    """(messages or None, reward, counts) from the result of `step`. Raises WrongValue for any other value."""
    says, reward, counts = answer if isinstance(answer, Reply) else (answer, 0.0, {})
    if not isinstance(counts, Mapping):
        raise WrongValue(f"step returned {type(counts).__name__} as its counts: want a mapping of names")
    number = _number(reward, "its reward")
    numbers = {_free(str(name)): _number(count, f"the count {name}") for name, count in counts.items()}
    if says is None:
        return None, number, numbers
    messages = [{"role": "user", "content": says}] if isinstance(says, str) else says
    if not isinstance(messages, Sequence) or not messages or not all(map(_is_message, messages)):
        raise WrongValue(
            f"step returned {type(says).__name__} {str(says)[:60]!r}: want a text, a list of chat messages, "
            "None or a Reply"
        )
    if any(message["role"] == "assistant" for message in messages):
        raise WrongValue(
            "step returned a message of the assistant, for whom the policy speaks: give it another role, "
            "such as user"
        )
    chat = [{k: utf8(v) if isinstance(v, str) else v for k, v in m.items()} for m in messages]
    return chat, number, numbers


def _free(name: str) -> str:
    """The name of a count, which is also that of a metric.

    Raises WrongValue if another metric has the name.
    """
    try:
        check_name(name, TAKEN)
    except ValueError as problem:
        raise WrongValue(f"step returned a count with {problem}") from None
    return name


def _number(value: Any, what: str) -> float:
    try:
        return real_number(value)
    except NoNumberError as error:
        raise WrongValue(f"step returned {error} as {what}") from None


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )
