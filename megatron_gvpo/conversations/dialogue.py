"""The calls of a program to the policy: contexts as exact tokens, limits, and the rollout at the end."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_gvpo.conversations.chat import Message, RequestRefused, begins_with
from megatron_gvpo.conversations.converse import ConversationLimits, Respond, TurnEnds, append_turn
from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.groups import Prompt, Rollout, message_text
from megatron_gvpo.servers.request import Request, derived_seed

_TOO_LONG = "context_length_exceeded"  # OpenAI's code
_MOST_GIVEN_UP = 100  # a program that never waits for answers would go on for ever
Templates = Callable[[str], Template]  # the template that shows these tools, given as JSON


class Dialogue:
    """The calls of one rollout's program. It is used in one event loop.

    The seed of a call is made from its context, so that concurrent calls get the same answers in any order.
    `longest_token`: the largest number of characters that a token can stand for.
    """

    def __init__(
        self,
        respond: Respond,
        templates: Templates,
        prompt: Prompt,
        seed: int,
        limits: ConversationLimits,
        longest_token: int,
    ) -> None:
        # The future gets the engine's error, if there is one.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_call = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.limited = False  # a call was refused because no turns, tokens or time were left
        self._respond, self._templates = respond, templates
        self._prompt, self._seed = prompt, seed
        self._limits = limits
        self._most_characters = longest_token * (len(prompt.token_ids) + limits.max_tokens)
        self._remaining = limits.max_tokens
        self._calls = AnsweredCalls(prompt.token_ids)
        self._started: Counter[int] = Counter()  # number of calls, by the hash of the context
        self._turns = 0  # calls that were answered or are running
        self._given_up = 0  # calls whose client went away before the answer
        self._reserved = 0  # tokens that running calls may take
        self._running: set[asyncio.Task[Any]] = set()
        self._freed = asyncio.Condition()
        self._last_activity = running_seconds()
        self._spent = 0.0  # seconds between answers
        self._refused = 0  # the number of calls since the last answer that a limit refused

    def idle_seconds(self) -> float:
        """Seconds since the policy's last answer; 0 while a call is running.

        A refused call does not count.
        """
        return 0.0 if self._running else running_seconds() - self._last_activity

    @property
    def insists(self) -> bool:
        """True if the program keeps calling the policy although a limit was reached."""
        return self._refused > 1

    def note_activity(self) -> None:
        """Count `idle_seconds` from now on: the program has something to do."""
        self._last_activity = running_seconds()

    def context(self, messages: Sequence[Message], tools: str) -> tuple[int, ...]:
        """Return the tokens of the context that the policy answers.

        A chat that continues from an answer keeps the tokens that were sampled. Anything else is rendered by
        the chat template. Raises RequestRefused, also for texts that cannot fit: tokens of 30 MB would take
        minutes and gigabytes, and no other rollout would be served meanwhile.
        """
        if (characters := sum(len(message_text(m)) for m in messages)) > self._most_characters:
            self.first_call.set()
            self._refuse(f"{characters} characters leave no room for an answer: {self._most}", _TOO_LONG)
        try:
            template = self._templates(tools)
            if (call := self._continued_call(messages, tools)) is None:
                context = template.opening(messages, self._prompt)
            else:
                end = self._calls.end(call)
                context = end + template.tokens_between(end[-1], messages[len(call.messages) :])
        except DataError as error:
            raise RequestRefused(str(error), "invalid_messages") from None
        if not context:
            raise RequestRefused("the messages are empty", "invalid_messages")
        return context

    def _continued_call(self, messages: Sequence[Message], tools: str) -> AnsweredCall | None:
        """The call from which the messages continue: the latest of those with the longest chat."""
        longest_first = sorted(self._calls.calls, key=lambda call: (-len(call.messages), -call.number))
        for call in longest_first:
            if call.messages and call.tools == tools and begins_with(messages, call.messages):
                return call
        return None

    async def ask(self, context: tuple[int, ...], most: int | None) -> Rollout:
        """The policy's answer of at most `most` tokens.

        The caller records the answer. Raises RequestRefused.
        """
        self.first_call.set()
        idle = self.idle_seconds()
        if self.failed.done():
            raise RequestRefused("the run has ended", "ended", 503)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        reserved, is_answered = 0, False
        try:
            reserved = await self._reserve(context, most or self._limits.turn_tokens, self._spent + idle)
            self._spent += idle
            self._refused = 0
            seed = derived_seed(self._seed, *context, self._started[hash(context)])
            self._started[hash(context)] += 1
            try:
                response = await self._respond(Request(context, 1, seed, reserved))
                is_answered = True
                return response
            except Exception as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                raise RequestRefused("the run has ended", "ended", 503) from None
        finally:
            self._running.discard(task)
            if reserved:
                self.note_activity()
                if not is_answered:
                    self._turns -= 1
                    self._given_up += 1
            async with self._freed:
                self._reserved -= reserved
                self._freed.notify_all()

    async def _reserve(self, context: tuple[int, ...], most: int, seconds: float) -> int:
        """Reserve tokens for a call. It waits until running calls release tokens instead of reserving fewer.

        Raises RequestRefused if a limit is reached; the program has taken `seconds` so far.
        """
        wanted = min(self._limits.turn_tokens, most)
        async with self._freed:
            while self._room(context) < wanted and self._reserved:
                await self._freed.wait()
            self._check(context, seconds)
            reserved = min(wanted, self._room(context))
            self._reserved += reserved
            self._turns += 1
        return reserved

    def record(
        self,
        context: tuple[int, ...],
        response: Rollout,
        agent: str,
        messages: Sequence[Message] = (),
        tools: str = "",
    ) -> None:
        """Add a call that was answered; its `messages` end with the answer."""
        self._remaining -= self._calls.add(context, response, agent, messages, tools)

    def _room(self, context: tuple[int, ...]) -> int:
        """The number of tokens that an answer in this context may have."""
        return self._remaining - self._reserved - len(context) + self._calls.shared_length(context)

    def _check(self, context: tuple[int, ...], seconds: float) -> None:
        """Raises RequestRefused if no turns, time or tokens are left; the program has taken `seconds`."""
        problem = None
        if self._turns >= self._limits.turns:
            problem = f"no turns are left: rollout.conversation.turns={self._limits.turns}", "turns"
        elif self._given_up >= _MOST_GIVEN_UP:
            problem = f"the client gave up {self._given_up} calls: it is to wait longer for answers", "turns"
        elif seconds > self._limits.seconds:
            limit = f"rollout.conversation.rollout_timeout={self._limits.seconds:g} seconds"
            problem = f"no time is left: {limit}", "time"
        elif self._room(context) < 1:
            problem = f"these {len(context)} tokens leave no room for an answer: {self._most}", _TOO_LONG
        if problem is not None:
            self._refuse(*problem)

    @property
    def _most(self) -> str:
        return f"rollout.max_tokens={self._limits.max_tokens} bounds all that comes after the prompt"

    def _refuse(self, problem: str, code: str) -> NoReturn:
        self.limited = True
        self._refused += 1
        raise RequestRefused(problem, code)

    async def close(self) -> None:
        """End the calls that no caller waits for any more."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def rollout(self, reward: float, counts: dict[str, float]) -> Rollout | None:
        """The rollout that consists of the answered calls; None without any."""
        calls = self._calls.without_retries()
        if not calls:
            return None
        rollout = self._calls.rollout(calls)
        if self.limited:
            rollout.finish_reason = "length"
        rollout.counts = {
            **counts,
            "environment_reward": reward,
            "observation_tokens": float(sum(len(turn.given) for turn in rollout.turns)),
            "overridden_calls": float(self.counts["overridden_calls"]),
            "retried_calls": float(len(self._calls.calls) - len(calls)),
        }
        return rollout


def tools_text(tools: list[dict[str, Any]]) -> str:
    """Write tools as a text; equal tools give equal texts."""
    return json.dumps(tools) if tools else ""


@dataclass(frozen=True)
class AnsweredCall:
    """A call that was answered. `messages` ends with the answer; it is empty for a call in tokens."""

    number: int  # counts the answers, from 0
    context: tuple[int, int]  # the context's length, and a hash of its tokens
    response: Rollout
    agent: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: str = ""  # the call's tools as JSON


class AnsweredCalls:
    """The answered calls of one program. Contexts and messages are stored once, where calls share them.

    A call's context is the tokens of its request to the engine. Only these tokens tell whether it continues a
    chat, has a changed history, or starts over (`TurnEnds`).
    """

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.calls: list[AnsweredCall] = []
        self._prompt, self._ends = prompt, TurnEnds(prompt)
        self._texts: dict[str, str] = {}

    def shared_length(self, context: tuple[int, ...]) -> int:
        """The number of tokens that the context shares with the prompt or with an earlier call."""
        return self._ends.shared_prefix(context).length

    def end(self, call: AnsweredCall) -> tuple[int, ...]:
        """The call's context and the answer."""
        return self._ends.end(call.number)

    def add(
        self,
        context: tuple[int, ...],
        response: Rollout,
        agent: str = "",
        messages: Sequence[dict[str, Any]] = (),
        tools: str = "",
    ) -> int:
        """Add a call. Returns how many of its tokens no earlier call had, the answer's included."""
        shared = self._ends.shared_prefix(context)
        new_context = context[shared.length :]
        self._ends.add(shared, new_context, response.token_ids)
        before = next((call.messages for call in reversed(self.calls) if call.agent == agent), ())
        stored = []
        for i, m in enumerate(messages):
            message = {**m, "content": self._intern(m["content"] or "")}
            stored.append(before[i] if message in before[i : i + 1] else message)
        key = len(context), hash(context)
        call = AnsweredCall(len(self.calls), key, response, agent, tuple(stored), self._intern(tools))
        self.calls.append(call)
        return len(new_context) + len(response.token_ids)

    def without_retries(self) -> list[AnsweredCall]:
        """Return the calls without failed attempts that were repeated.

        An agent that calls twice with the same context tries again. Of these calls those count whose answers
        are in the context of a later call; if there are none, those whose answers a later call has without
        their thoughts; and otherwise the last one.
        """
        attempts = defaultdict[tuple[tuple[int, int], str], list[AnsweredCall]](list)
        for call in self.calls:
            attempts[call.context, call.agent].append(call)
        counted: list[AnsweredCall] = []
        # A call that shows an answer has a longer context than the call that was answered.
        for _, same in sorted(attempts.items(), key=lambda item: -item[0][0][0]):
            if len(same) > 1:
                same = self._shown(same, counted) or self._shown_in_messages(same) or same[-1:]
            counted += same
        return sorted(counted, key=lambda call: call.number)

    def _shown(self, attempts: Sequence[AnsweredCall], others: Sequence[AnsweredCall]) -> list[AnsweredCall]:
        """The attempts whose answers appear in the contexts of other calls."""
        ends, shown = [self.end(call) for call in attempts], set[int]()
        for other in others:
            context = self.end(other)[: other.context[0]]
            shown |= {i for i, end in enumerate(ends) if context[: len(end)] == end}
        return [attempts[i] for i in sorted(shown)]

    def _shown_in_messages(self, attempts: Sequence[AnsweredCall]) -> list[AnsweredCall]:
        """The attempts whose answers, without thoughts, appear in the messages of later calls."""
        chats = [(call.number, call.messages[:-1]) for call in self.calls]
        return [
            attempt
            for attempt in attempts
            if attempt.messages
            and any(
                number > attempt.number and begins_with(chat, attempt.messages, with_thoughts=False)
                for number, chat in chats
            )
        ]

    def rollout(self, calls: Sequence[AnsweredCall]) -> Rollout:
        """Return these calls as the turns of one rollout."""
        rollout = Rollout([], [], "", calls[-1].response.finish_reason)
        ends = TurnEnds(self._prompt)
        for call in calls:
            context = self.end(call)[: call.context[0]]
            shared = ends.shared_prefix(context)
            new_context = context[shared.length :]
            append_turn(rollout, call.response, new_context, shared.after, shared.keep, call.agent)
            ends.add(shared, new_context, call.response.token_ids)
        rollout.messages = list(calls[-1].messages)
        return rollout

    def _intern(self, text: str) -> str:
        """The text, as one object for all calls that contain it."""
        return self._texts.setdefault(text, text)
