"""Where the context of a turn begins: the tokens that it shares with an earlier turn, or with the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple


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
