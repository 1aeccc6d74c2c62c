"""One conversation: the policy and the environment take turns until one of them, or a limit, ends it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

from megatron_gvpo.conversations.environments import EnvironmentLost, Episode
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.groups import LOST, Rollout
from megatron_gvpo.servers.request import Request, derived_seed
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.turns import Turn
from megatron_gvpo.workers.environment_worker import too_long

Say = Callable[[Request], Awaitable[Rollout]]  # the policy's next turn, as the response to a context
_NOTES = 8  # messages of an answer that notes stand for, one by one; else one note for all


@dataclass(frozen=True)
class Limits:
    """Limits: turns of the policy; tokens after the prompt, of a turn, and of an observation.

    `seconds`: for all answers of the environment.
    """

    turns: int
    max_tokens: int
    turn_tokens: int
    observation_tokens: int
    seconds: float = math.inf

    @classmethod
    def of(cls, config: ConversationConfig, max_tokens: int) -> Limits:
        """The configured limits; `max_tokens` is that of the sampling."""
        return cls(
            config.turns,
            max_tokens,
            config.turn_tokens or max_tokens,
            config.observation_tokens,
            config.rollout_timeout or math.inf,
        )


async def converse(
    say: Say, episode: Episode, template: Template, prompt: tuple[int, ...], seed: int, limits: Limits
) -> Rollout:
    """Hold a conversation about `prompt`; turn i of the policy is sampled with a seed made from `seed` and i.

    The policy speaks last. `finish_reason`: "stop" where the policy or the environment ended it, "length"
    where no tokens, turns or seconds were left, "lost" where the environment failed.
    """
    rollout = Rollout([], [], "", "stop")
    context, left = prompt, limits.max_tokens
    begins, ends = Place(-1, None, len(prompt)), Ends(prompt)
    counts = {"environment_reward": 0.0, "observation_tokens": 0.0}
    try:
        while True:
            said = await say(
                Request(
                    context,
                    1,
                    derived_seed(seed, len(rollout.turns)),
                    min(left, limits.turn_tokens),
                )
            )
            given = context[begins.shared :]
            append_turn(rollout, said, given, begins.after, begins.keep)
            ended = (*context, *said.token_ids)
            left -= len(said.token_ids)
            text = template.text(said.token_ids)
            rollout.messages.append({"role": "assistant", "content": text})
            rollout.finish_reason = said.finish_reason
            if said.finish_reason == "length":
                break
            answer = await episode.step(text)
            rollout.turns[-1] = rollout.turns[-1]._replace(reward=answer.reward)
            for name, number in {**answer.counts, "environment_reward": answer.reward}.items():
                counts[name] = counts.get(name, 0.0) + number
            if answer.says is None:
                break
            messages = _observed(template, said.token_ids[-1], answer.says, limits, counts)
            context = _followed(template, prompt, ended, rollout.messages, messages)
            if template.again:
                ends.add(begins, given, said.token_ids)
                begins = ends.place(context)
            else:
                begins = Place(len(rollout.turns) - 1, None, len(ended))
            more = len(context) - begins.shared
            if len(rollout.turns) == limits.turns or more >= left or episode.seconds > limits.seconds:
                rollout.finish_reason = "length"
                break
            rollout.messages += messages
            left -= more
            counts["observation_tokens"] += more
    except EnvironmentLost as error:
        return Rollout([], [], str(error), LOST)
    finally:
        episode.end()
    rollout.counts = counts
    return rollout


def append_turn(
    rollout: Rollout,
    said: Rollout,
    given: tuple[int, ...],
    after: int,
    keep: int | None,
    agent: str = "",
) -> None:
    """Add a turn: the policy's tokens, and what was given before them (see `turns.Turn`)."""
    begin = len(rollout.token_ids)
    spans = said.spans or [(said.weight_version, 0, len(said.token_ids))]
    for version, first, end in spans:
        if rollout.spans and rollout.spans[-1][0] == version:
            _, first, _ = rollout.spans.pop()
        else:
            first += begin
        rollout.spans.append((version, first, begin + end))
    rollout.turns.append(Turn(begin, after, keep, given, agent))
    rollout.token_ids += said.token_ids
    rollout.logprobs += said.logprobs
    rollout.weight_version = min(version for version, _, _ in rollout.spans)
    rollout.seconds = (rollout.seconds or 0.0) + (said.seconds or 0.0)
    rollout.server = said.server


def _observed(
    template: Template, last: int, messages: list[dict[str, Any]], limits: Limits, counts: dict[str, float]
) -> list[dict[str, Any]]:
    """The environment's messages; where they are too long, a note instead of the longest of them.

    Raises EnvironmentLost.
    """

    def length(shown: list[dict[str, Any]]) -> int:
        try:
            return template.length(last, shown)
        except DataError as error:  # for example, a role that the template does not know
            raise EnvironmentLost(str(error)) from None

    def note(message: dict[str, Any], tokens: int) -> dict[str, Any]:
        return {**message, "content": too_long(tokens, "tokens")}

    if (whole := length(messages)) <= limits.observation_tokens:
        return messages
    counts["observations_dropped"] = counts.get("observations_dropped", 0.0) + 1
    shown = list(messages)
    longest_first = sorted(range(len(messages)), key=lambda i: len(messages[i]["content"]), reverse=True)
    for i in longest_first[:_NOTES]:
        shown[i] = note(messages[i], length([messages[i]]))
        if length(shown) <= limits.observation_tokens:
            return shown
    return [note(messages[0], whole)]


def _followed(
    template: Template,
    prompt: tuple[int, ...],
    ended: tuple[int, ...],
    before: list[dict[str, Any]],
    answer: list[dict[str, Any]],
) -> tuple[int, ...]:
    """The context of the policy's next turn. Raises EnvironmentLost."""
    try:
        return template.followed(prompt, ended, before, answer)
    except DataError as error:
        raise EnvironmentLost(str(error)) from None


# Where the context of a turn begins: the tokens that it shares with an earlier turn, or with the prompt.


class Place(NamedTuple):
    """Where a context begins: with `keep` tokens of what the turn `after` ended with (-1: the prompt)."""

    after: int
    keep: int | None  # None: all
    shared: int  # tokens


class _End(NamedTuple):
    """The end of a turn: `shared` tokens of another's end, and the tokens that it added."""

    after: int
    shared: int
    added: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.shared + len(self.added)


class Ends:
    """The tokens with which the prompt and every turn ended. A token that several of them share is kept once.

    So a conversation takes as much memory as it has tokens, however many turns repeat them.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._ends = [_End(-1, 0, tuple(prompt))]  # the prompt's, and then the turns'

    def place(self, context: tuple[int, ...]) -> Place:
        """The beginning that shares most tokens with it; of several, a whole one, then the latest."""
        shared: list[int] = []
        for after, begin, added in self._ends:
            if begin and shared[after] < begin:
                shared.append(shared[after])
            else:
                shared.append(begin + _common(added, context[begin : begin + len(added)]))
        i = max(range(len(shared)), key=lambda i: (shared[i], shared[i] == self._ends[i].length, i))
        return Place(i - 1, None if shared[i] == self._ends[i].length else shared[i], shared[i])

    def add(self, place: Place, given: Sequence[int], said: Sequence[int]) -> None:
        """Add a turn: what its context has after the place, and its own tokens."""
        self._ends.append(_End(place.after + 1, place.shared, (*given, *said)))

    def end(self, turn: int) -> tuple[int, ...]:
        """The turn's context and own tokens."""
        after, shared, added = self._ends[turn + 1]
        parts = [added]
        while shared:
            after, begin, added = self._ends[after]
            parts.append(added[: max(shared - begin, 0)])
            shared = min(shared, begin)
        return tuple(chain.from_iterable(reversed(parts)))


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with in common."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


class Policy(Protocol):
    """The policy in the conversations of a batch, which have numbers."""

    async def say(self, conversation: int, request: Request) -> Rollout:
        """The policy's next turn in the conversation: one response to the request. Raises RolloutError."""

    def ended(self, conversation: int) -> None:
        """The conversation needs no more turns."""
