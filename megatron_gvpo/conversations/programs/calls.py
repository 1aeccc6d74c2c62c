"""The calls that a program has made to the policy, and the rollout that they are.

A call's context is the tokens that the engine was asked with. What it shares with an earlier call, or with
the prompt, is found by comparing tokens; so a chat that goes on, a history that was changed, and an agent
that begins anew are told apart by nothing but their tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_gvpo.conversations.converse import append_turn
from megatron_gvpo.groups import Rollout


@dataclass(frozen=True)
class Call:
    """A call that was answered. `messages` ends with the answer; it is empty for a call in tokens."""

    context: tuple[int, ...]
    said: Rollout
    agent: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: str = ""  # as JSON

    @property
    def end(self) -> tuple[int, ...]:
        """The context and the answer."""
        return (*self.context, *self.said.token_ids)


class Place(NamedTuple):
    """Where a context begins: with `keep` tokens of what the call `after` ended with (-1: the prompt)."""

    after: int
    keep: int | None  # None: all
    shared: int  # tokens


def place(prompt: Sequence[int], ends: Sequence[Sequence[int]], context: Sequence[int]) -> Place:
    """The beginning that shares most tokens with the context; of several, a whole one, then the latest."""
    found = [(i - 1, _common(end, context), len(end)) for i, end in enumerate([prompt, *ends])]
    after, shared, length = max(found, key=lambda one: (one[1], one[1] == one[2], one[0]))
    return Place(after, None if shared == length else shared, shared)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences (of one type) begin with in common."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def without_retries(calls: Sequence[Call]) -> list[Call]:
    """The calls without those that were only tried again.

    An agent that asks twice with the same context tries again. The answers that a later call shows count; the
    last one, where none is shown.
    """
    same = defaultdict[tuple[str, tuple[int, ...]], list[Call]](list)
    for call in calls:
        same[call.agent, call.context].append(call)
    kept: list[Call] = []
    # A call that shows an answer has a longer context than the call that was answered.
    for _, tries in sorted(same.items(), key=lambda one: -len(one[0][1])):
        if len(tries) > 1:
            ends = [call.end for call in tries]
            shown = [
                one
                for one, end in zip(tries, ends, strict=True)
                if any(later.context[: len(end)] == end for later in kept)
            ]
            tries = shown or tries[-1:]
        kept += tries
    chosen = set(map(id, kept))
    return [call for call in calls if id(call) in chosen]


def rollout_of_calls(prompt: tuple[int, ...], calls: Sequence[Call]) -> Rollout:
    """The calls as the turns of one rollout, in the order in which they were answered."""
    rollout = Rollout([], [], "", calls[-1].said.finish_reason)
    ends: list[tuple[int, ...]] = []
    for call in calls:
        after, keep, shared = place(prompt, ends, call.context)
        append_turn(rollout, call.said, call.context[shared:], after, keep, call.agent)
        ends.append(call.end)
    rollout.messages = [{**message, "content": message["content"] or ""} for message in calls[-1].messages]
    return rollout
