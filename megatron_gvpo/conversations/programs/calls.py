"""The calls that a program has made to the policy, and the rollout that they are.

A call's context is the tokens that the engine was asked with. A chat that goes on, a history that was
changed, and an agent that starts over are told apart by nothing but their tokens (`places`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gvpo.conversations.converse import append_turn
from megatron_gvpo.conversations.places import Ends
from megatron_gvpo.groups import Rollout


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
