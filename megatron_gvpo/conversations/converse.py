"""One conversation: the policy and the environment take turns until one of them, or a limit, ends it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

from megatron_gvpo.conversations.environments import Answer, EnvironmentLost, Episode
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.groups import LOST, Prompt, Rollout, joined_supports
from megatron_gvpo.servers.request import Request, derived_seed
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.turns import Turn
from megatron_gvpo.workers.environments import too_long

Respond = Callable[[Request], Awaitable[Rollout]]  # the policy's next turn, as the response to a context
# In an answer that is too long, notes replace up to this many messages; if that is not enough, one note
# replaces the answer.
_NOTES = 8


@dataclass(frozen=True)
class ConversationLimits:
    """The limits of a conversation.

    `turns` of the policy, `max_tokens` after the prompt, `turn_tokens` of a turn, `observation_tokens` of an
    observation, and `seconds` for all answers of the environment together.
    """

    turns: int
    max_tokens: int
    turn_tokens: int
    observation_tokens: int
    seconds: float = math.inf

    @classmethod
    def of(cls, config: ConversationConfig, max_tokens: int) -> ConversationLimits:
        """The configured limits; `max_tokens` comes from the section of the sampling."""
        return cls(
            config.turns,
            max_tokens,
            config.turn_tokens or max_tokens,
            config.observation_tokens,
            config.rollout_timeout or math.inf,
        )


async def run_groups(
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    run: Callable[[int, Prompt, Request, int], Coroutine[Any, Any, Rollout]],
) -> list[list[Rollout]]:
    """`n` rollouts of each prompt, all at once; raises the first error of one.

    `run` gets a rollout's number in the batch, its prompt, its request and its number in the group.
    """
    members = [(p, r, i) for p, r in zip(prompts, requests, strict=True) for i in range(r.n)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(number, *member)) for number, member in enumerate(members)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    rollouts = iter(task.result() for task in tasks)
    return [[next(rollouts) for _ in range(request.n)] for request in requests]


async def converse(
    respond: Respond,
    episode: Episode,
    template: Template,
    prompt: tuple[int, ...],
    seed: int,
    limits: ConversationLimits,
) -> Rollout:
    """Run a conversation about `prompt`; turn i of the policy is sampled with a seed made from `seed` and i.

    The last turn is the policy's. `finish_reason` is "stop" if the policy or the environment ended the
    conversation, "length" if no tokens, turns or seconds were left, and "lost" if the environment failed.
    """
    try:
        return await _Conversation(respond, episode, template, prompt, seed, limits).run()
    except EnvironmentLost as error:
        return Rollout([], [], str(error), LOST)
    finally:
        episode.end()


class _Conversation:
    """The state of one conversation between two turns of the policy."""

    def __init__(
        self,
        respond: Respond,
        episode: Episode,
        template: Template,
        prompt: tuple[int, ...],
        seed: int,
        limits: ConversationLimits,
    ) -> None:
        self._respond, self._episode, self._template = respond, episode, template
        self._prompt, self._seed, self._limits = prompt, seed, limits
        self._rollout = Rollout([], [], "", "stop")
        self._context = prompt
        self._remaining = limits.max_tokens  # the number of tokens that the conversation may still have
        self._shared = SharedPrefix(-1, None, len(prompt))  # context in common with earlier turns
        self._ends = TurnEnds(prompt)
        self._counts = {"environment_reward": 0.0, "observation_tokens": 0.0}

    async def run(self) -> Rollout:
        """Run the conversation, and return its rollout. Raises EnvironmentLost."""
        rollout = self._rollout
        while True:
            response = await self._sample_turn()
            if response.finish_reason == "length":
                break
            answer = await self._episode.step(rollout.messages[-1]["content"])
            self._count(answer)
            if answer.messages is None:
                break
            if not self._observe(response, answer.messages):
                rollout.finish_reason = "length"
                break
        rollout.counts = self._counts
        return rollout

    async def _sample_turn(self) -> Rollout:
        """Sample a turn of the policy, and add it to the rollout."""
        seed = derived_seed(self._seed, len(self._rollout.turns))
        max_tokens = min(self._remaining, self._limits.turn_tokens)
        response = await self._respond(Request(self._context, 1, seed, max_tokens))
        new_context = self._context[self._shared.length :]
        append_turn(self._rollout, response, new_context, self._shared.after, self._shared.keep)
        self._remaining -= len(response.token_ids)
        text = self._template.text(response.token_ids)
        self._rollout.messages.append({"role": "assistant", "content": text})
        self._rollout.finish_reason = response.finish_reason
        return response

    def _count(self, answer: Answer) -> None:
        """Add the answer's reward to the turn, and its counts to the conversation's."""
        self._rollout.turns[-1] = self._rollout.turns[-1]._replace(reward=answer.reward)
        for name, number in {**answer.counts, "environment_reward": answer.reward}.items():
            self._counts[name] = self._counts.get(name, 0.0) + number

    def _observe(self, response: Rollout, answer: list[dict[str, Any]]) -> bool:
        """Make the context of the policy's next turn. False if a limit allows no further turn."""
        rollout, limits = self._rollout, self._limits
        messages = _observed(self._template, response.token_ids[-1], answer, limits, self._counts)
        end = (*self._context, *response.token_ids)
        context = _next_context(self._template, self._prompt, end, rollout.messages, messages)
        if self._template.again:
            self._ends.add(self._shared, self._context[self._shared.length :], response.token_ids)
            self._shared = self._ends.shared_prefix(context)
        else:
            self._shared = SharedPrefix(len(rollout.turns) - 1, None, len(end))
        self._context = context
        new_tokens = len(context) - self._shared.length
        if len(rollout.turns) == limits.turns or new_tokens >= self._remaining:
            return False
        if self._episode.seconds > limits.seconds:
            return False
        rollout.messages += messages
        self._remaining -= new_tokens
        self._counts["observation_tokens"] += new_tokens
        return True


def append_turn(
    rollout: Rollout,
    response: Rollout,
    observation: tuple[int, ...],
    after: int,
    keep: int | None,
    agent: str = "",
) -> None:
    """Add a turn: the policy's tokens, and the tokens `observation` to it before them (see `turns.Turn`)."""
    begin = len(rollout.token_ids)
    spans = response.spans or [(response.weight_version, 0, len(response.token_ids))]
    for version, first, end in spans:
        if rollout.spans and rollout.spans[-1][0] == version:
            _, first, _ = rollout.spans.pop()
        else:
            first += begin
        rollout.spans.append((version, first, begin + end))
    rollout.turns.append(Turn(begin, after, keep, observation, agent))
    rollout.support = joined_supports(rollout, begin, response)
    rollout.token_ids += response.token_ids
    rollout.logprobs += response.logprobs
    rollout.weight_version = min(version for version, _, _ in rollout.spans)
    rollout.seconds = (rollout.seconds or 0.0) + (response.seconds or 0.0)
    rollout.server = response.server


def _observed(
    template: Template,
    last: int,
    messages: list[dict[str, Any]],
    limits: ConversationLimits,
    counts: dict[str, float],
) -> list[dict[str, Any]]:
    """The environment's messages, after a turn that ended with the token `last`.

    If the messages are too long, notes replace the longest of them. Raises EnvironmentLost.
    """

    def length(shown: list[dict[str, Any]]) -> int:
        try:
            return template.length(last, shown)
        except DataError as error:  # for example, a role that the template does not know
            raise EnvironmentLost(str(error)) from None

    def note(message: dict[str, Any], tokens: int) -> dict[str, Any]:
        return {**message, "content": too_long(tokens, "tokens")}

    total = length(messages)
    if total <= limits.observation_tokens:
        return messages
    counts["observations_dropped"] = counts.get("observations_dropped", 0.0) + 1
    shown = list(messages)
    longest_first = sorted(range(len(messages)), key=lambda i: len(messages[i]["content"]), reverse=True)
    for i in longest_first[:_NOTES]:
        shown[i] = note(messages[i], length([messages[i]]))
        if length(shown) <= limits.observation_tokens:
            return shown
    return [note(messages[0], total)]


def _next_context(
    template: Template,
    prompt: tuple[int, ...],
    end: tuple[int, ...],
    before: list[dict[str, Any]],
    answer: list[dict[str, Any]],
) -> tuple[int, ...]:
    """The context of the policy's next turn; `end` is that of its last turn. Raises EnvironmentLost."""
    try:
        return template.followed(prompt, end, before, answer)
    except DataError as error:
        raise EnvironmentLost(str(error)) from None


# The contexts of turns share most of their tokens. `TurnEnds` finds these, and stores each token once.


class SharedPrefix(NamedTuple):
    """The tokens that a context shares with the end of the turn `after` (-1: with the prompt)."""

    after: int
    keep: int | None  # tokens to keep; None: all up to that end
    length: int  # tokens kept, known even if `keep` is None


class _End(NamedTuple):
    """The end of a turn: the first `shared` tokens of another's end, and the tokens that it added."""

    after: int
    shared: int
    added: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.shared + len(self.added)


class TurnEnds:
    """The tokens with which the prompt and every turn ended. Tokens that several turns share are stored once.

    So a conversation takes as much memory as it has tokens, however many turns repeat them.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._ends = [_End(-1, 0, tuple(prompt))]  # ends of the prompt and of each turn

    def shared_prefix(self, context: tuple[int, ...]) -> SharedPrefix:
        """The longest shared prefix; of several equally long ones, a complete end, then the latest."""
        shared: list[int] = []
        for after, begin, added in self._ends:
            if begin and shared[after] < begin:
                shared.append(shared[after])
            else:
                shared.append(begin + _common(added, context[begin : begin + len(added)]))
        i = max(range(len(shared)), key=lambda i: (shared[i], shared[i] == self._ends[i].length, i))
        is_complete = shared[i] == self._ends[i].length
        return SharedPrefix(i - 1, None if is_complete else shared[i], shared[i])

    def add(self, shared: SharedPrefix, new_context: Sequence[int], response: Sequence[int]) -> None:
        """Add a turn: the tokens of its context after the shared prefix, and its own tokens."""
        self._ends.append(_End(shared.after + 1, shared.length, (*new_context, *response)))

    def end(self, turn: int) -> tuple[int, ...]:
        """Return the turn's context and its own tokens."""
        after, shared, added = self._ends[turn + 1]
        parts = [added]
        while shared:
            after, begin, added = self._ends[after]
            parts.append(added[: max(shared - begin, 0)])
            shared = min(shared, begin)
        return tuple(chain.from_iterable(reversed(parts)))


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """The number of tokens in the common beginning of both sequences."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


class Responder(Protocol):
    """The policy's answers in the numbered conversations of a batch."""

    async def respond(self, conversation: int, request: Request) -> Rollout:
        """The policy's next turn in the conversation: one response to the request. Raises RolloutError."""

    def end(self, conversation: int) -> None:
        """Note that the conversation needs no more turns."""
