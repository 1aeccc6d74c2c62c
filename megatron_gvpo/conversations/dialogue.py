"""A program's side of a rollout: contexts as exact tokens, limits, and the rollout at the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gvpo.conversations.chat import Message, Refused, begins
from megatron_gvpo.conversations.converse import Ends, Limits, Say, append_turn
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.servers.request import Request, derived_seed

Templates = Callable[[str], Template]  # the template that shows these tools, given as JSON


class Dialogue:
    """The calls of one rollout's program. It lives in one event loop.

    The seed of a call is made from its context, so that agents that ask at the same time get
    the same answers in any order.
    """

    def __init__(self, say: Say, templates: Templates, prompt: Prompt, seed: int, limits: Limits) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the engine's error
        self.first_call = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.limited = False  # a call was refused because nothing was left
        self._say, self._templates, self._prompt, self._seed = say, templates, prompt, seed
        self._limits, self._left = limits, limits.max_tokens
        self._calls = Calls(prompt.token_ids)
        self._begun: Counter[int] = Counter()  # calls by the hash of their context
        self._turns = self._reserved = 0  # answered or asked; tokens that calls may take which are asked
        self._asking: set[asyncio.Task[Any]] = set()
        self._freed = asyncio.Condition()
        self._moved = time.monotonic()
        self._spent = 0.0  # seconds between answers
        self._refused = 0  # calls since the last answer, because nothing was left

    def idle_seconds(self) -> float:
        """The time since the policy last answered; 0 while it is asked. A refused call changes nothing."""
        return 0.0 if self._asking else time.monotonic() - self._moved

    @property
    def insists(self) -> bool:
        """True if the program goes on asking although nothing is left."""
        return self._refused > 1

    def moved(self) -> None:
        """The program has something to do from now on."""
        self._moved = time.monotonic()

    def context(self, messages: Sequence[Message], tools: str) -> tuple[int, ...]:
        """The tokens with which the policy is asked.

        A chat that goes on from an answer keeps the tokens that were sampled. Anything else is rendered by
        the chat template. Raises Refused.
        """
        longest_first = sorted(self._calls.calls, key=lambda call: (-len(call.messages), -call.number))
        goes_on = (
            call
            for call in longest_first
            if call.messages and call.tools == tools and begins(messages, call.messages)
        )
        try:
            template = self._templates(tools)
            if (call := next(goes_on, None)) is None:
                found = template.opening(messages, self._prompt)
            else:
                end = self._calls.end(call)
                found = end + template.given(end[-1], messages[len(call.messages) :])
        except DataError as error:
            raise Refused(str(error), "invalid_messages") from None
        if not found:
            raise Refused("the messages are empty", "invalid_messages")
        return found

    async def ask(self, context: tuple[int, ...], most: int | None, agent: str) -> Rollout:
        """The policy's answer; `most`: of so many tokens. The caller records it. Raises Refused."""
        self.first_call.set()
        idle = self.idle_seconds()
        if self.failed.done():
            raise Refused("the run has ended", "ended", 503)
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        wanted = min(self._limits.turn_tokens, most or self._limits.turn_tokens)
        reserved = 0
        try:
            async with self._freed:  # a call does not take less because another is not answered yet
                while self._room(context) < wanted and self._reserved:
                    await self._freed.wait()
                self._check(context, self._spent + idle)
                reserved = min(wanted, self._room(context))
                self._reserved += reserved
                self._turns += 1
            self._spent += idle
            self._refused = 0
            seed = derived_seed(self._seed, *context, self._begun[hash(context)])
            self._begun[hash(context)] += 1
            try:
                return await self._say(Request(context, 1, seed, reserved))
            except Exception as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                raise Refused("the run has ended", "ended", 503) from None
        finally:
            self._asking.discard(task)
            if reserved:
                self.moved()
            async with self._freed:
                self._reserved -= reserved
                self._freed.notify_all()

    def record(
        self,
        context: tuple[int, ...],
        said: Rollout,
        agent: str,
        messages: Sequence[Message] = (),
        tools: str = "",
    ) -> None:
        """Add a call that was answered; its `messages` end with the answer."""
        self._left -= self._calls.add(context, said, agent, messages, tools)

    def _room(self, context: tuple[int, ...]) -> int:
        return self._left - self._reserved - len(context) + self._calls.shared(context)

    def _check(self, context: tuple[int, ...], seconds: float) -> None:
        """Raises Refused if no turns, time or tokens are left; the program has taken `seconds` so far."""
        problem = None
        if self._turns >= self._limits.turns:
            problem = f"no turns are left: rollout.conversation.turns={self._limits.turns}", "turns"
        elif seconds > self._limits.seconds:
            limit = f"rollout.conversation.rollout_timeout={self._limits.seconds:g} seconds"
            problem = f"no time is left: {limit}", "time"
        elif self._room(context) < 1:
            limit = f"rollout.max_tokens={self._limits.max_tokens} bounds all that comes after the prompt"
            said = f"these {len(context)} tokens leave no room for an answer: {limit}"
            problem = said, "context_length_exceeded"
        if problem is not None:
            self.limited = True
            self._refused += 1
            raise Refused(*problem)

    async def close(self) -> None:
        """End the calls that nobody waits for any more."""
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def rollout(self, reward: float, counts: dict[str, float]) -> Rollout | None:
        """The rollout that the answered calls are; None without any."""
        kept = self._calls.without_retries()
        if not kept:
            return None
        rollout = self._calls.rollout(kept)
        if self.limited:
            rollout.finish_reason = "length"
        given = sum(len(turn.given) for turn in rollout.turns)
        rollout.counts = {
            **counts,
            "environment_reward": reward,
            "observation_tokens": float(given),
            "overridden_calls": float(self.counts["overridden_calls"]),
            "retried_calls": float(len(self._calls.calls) - len(kept)),
        }
        return rollout


def tools_text(tools: list[dict[str, Any]]) -> str:
    """Tools as a text that is the same for the same tools."""
    return json.dumps(tools) if tools else ""


# The calls that a program has made to the policy, and the rollout that they are.
#
# A call's context is the tokens that the engine was asked with. A chat that goes on, a history that was
# changed, and an agent that starts over are told apart by nothing but their tokens (`places`).


@dataclass(frozen=True)
class Call:
    """A call that was answered. `messages` ends with the answer; it is empty for a call in tokens."""

    number: int  # in the order of the answers, from 0
    context: tuple[int, int]  # its length, and a hash of its tokens
    said: Rollout
    agent: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: str = ""  # as JSON


class Calls:
    """The answered calls of one program. Contexts and messages are kept once, where calls share them."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.calls: list[Call] = []
        self._prompt, self._ends = prompt, Ends(prompt)
        self._texts: dict[str, str] = {}

    def shared(self, context: tuple[int, ...]) -> int:
        """The tokens that the context shares with the prompt or with an earlier call."""
        return self._ends.place(context).shared

    def end(self, call: Call) -> tuple[int, ...]:
        """The call's context and the answer."""
        return self._ends.end(call.number)

    def add(
        self,
        context: tuple[int, ...],
        said: Rollout,
        agent: str = "",
        messages: Sequence[dict[str, Any]] = (),
        tools: str = "",
    ) -> int:
        """Add a call. Returns how many of its tokens no earlier call had, the answer's included."""
        place = self._ends.place(context)
        given = context[place.shared :]
        self._ends.add(place, given, said.token_ids)
        before = next((call.messages for call in reversed(self.calls) if call.agent == agent), ())
        kept = []
        for i, m in enumerate(messages):
            message = {**m, "content": self._once(m["content"] or "")}
            kept.append(before[i] if message in before[i : i + 1] else message)
        key = len(context), hash(context)
        self.calls.append(Call(len(self.calls), key, said, agent, tuple(kept), self._once(tools)))
        return len(given) + len(said.token_ids)

    def without_retries(self) -> list[Call]:
        """The calls without those that were only tried again.

        An agent that asks twice with the same context tries again. The answers that a later call shows count;
        the last one, where none is shown.
        """
        same = defaultdict[tuple[tuple[int, int], str], list[Call]](list)
        for call in self.calls:
            same[call.context, call.agent].append(call)
        kept: list[Call] = []
        # A call that shows an answer has a longer context than the call that was answered.
        for _, tries in sorted(same.items(), key=lambda one: -one[0][0][0]):
            kept += self._shown(tries, kept) or tries[-1:] if len(tries) > 1 else tries
        return sorted(kept, key=lambda call: call.number)

    def _shown(self, tries: Sequence[Call], others: Sequence[Call]) -> list[Call]:
        """Those whose answers the contexts of the others show."""
        ends, shown = [self.end(call) for call in tries], set[int]()
        for other in others:
            context = self.end(other)[: other.context[0]]
            shown |= {i for i, end in enumerate(ends) if context[: len(end)] == end}
        return [tries[i] for i in sorted(shown)]

    def rollout(self, calls: Sequence[Call]) -> Rollout:
        """These calls as the turns of one rollout."""
        rollout = Rollout([], [], "", calls[-1].said.finish_reason)
        ends = Ends(self._prompt)
        for call in calls:
            context = self.end(call)[: call.context[0]]
            place = ends.place(context)
            given = context[place.shared :]
            append_turn(rollout, call.said, given, place.after, place.keep, call.agent)
            ends.add(place, given, call.said.token_ids)
        rollout.messages = list(calls[-1].messages)
        return rollout

    def _once(self, text: str) -> str:
        """The text, as the object that it was before."""
        return self._texts.setdefault(text, text)
