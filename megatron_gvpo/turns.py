"""The turns of a conversation, and the sequences of tokens in which its own tokens were sampled.

A rollout's tokens are the policy's own. The tokens that an environment or a template put between them are in
its turns, and nowhere else: no loss, estimator or mask ever sees them. `segments` alone joins the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """A run of a rollout's own tokens without a break, and the context in which it was sampled.

    The context is the first `keep` tokens of the turn `after` (its context and its own tokens), and then
    `given`. So a linear chat, a history that was cut and a sub-agent that starts from the prompt have the
    same form.
    """

    begin: int  # the index, among the rollout's own tokens, of the turn's first token
    after: int = -1  # the earlier turn whose end it continues; -1: the prompt
    keep: int | None = None  # tokens of that context to keep; None: all
    # Tokens of the environment before the turn's own tokens; they are never trained.
    given: tuple[int, ...] = ()
    agent: str = ""  # the speaker, if several agents share the policy
    reward: float | None = None  # reward from the environment for this turn; None without an answer


class Segment(NamedTuple):
    """A sequence of tokens, and where in it the rollout's own tokens are."""

    ids: list[int]
    own: list[tuple[int, int, int]]  # (index in `ids`, index among the rollout's own tokens, count)


def turn_of(values: Sequence[Any]) -> Turn:
    """A turn from its values, after msgpack or JSON has turned tuples into lists."""
    begin, after, keep, observation, *others = values
    return Turn(begin, after, keep, tuple(observation), *others)


def ends_of(turns: Sequence[Turn], own: int) -> list[int]:
    """The index after every turn's last own token, in a rollout of `own` tokens."""
    return [*(turn.begin for turn in turns[1:]), own]


def segments(prompt: Sequence[int], own: Sequence[int], turns: Sequence[Turn]) -> list[Segment]:
    """The sequences that hold every own token once, each after exactly its context.

    Without turns, the prompt and the response to it are the only sequence. A turn that continues where a
    sequence ends is in that sequence; any other starts a sequence with a copy of its context. Sequences
    without own tokens, and tokens after the last own one, are left out. Raises ValueError for turns that a
    conversation cannot have.
    """
    if not turns:
        return [Segment([*prompt, *own], [(len(prompt), 0, len(own))])]
    sequences: list[Segment] = []
    ends: list[tuple[int, int]] = []  # for each turn: (its segment, the segment's length at its end)
    if turns[0].begin != 0:
        raise ValueError(f"the first turn begins with own token {turns[0].begin}: want 0")
    for i, turn in enumerate(turns):
        end = turns[i + 1].begin if i + 1 < len(turns) else len(own)
        if not (turn.begin <= end <= len(own) and -1 <= turn.after < i):
            raise ValueError(
                f"turn {i} has the own tokens {turn.begin} to {end} of {len(own)} and continues turn "
                f"{turn.after}"
            )
        number, length = ends[turn.after] if turn.after >= 0 else (-1, len(prompt))
        if turn.keep is not None and not 0 <= turn.keep <= length:
            raise ValueError(f"turn {i} keeps {turn.keep} of {length} tokens")
        keep = length if turn.keep is None else turn.keep
        if number < 0 or keep != len(sequences[number].ids):
            context = prompt if number < 0 else sequences[number].ids
            sequences.append(Segment(list(context[:keep]), []))
            number = len(sequences) - 1
        ids, spans = sequences[number]
        ids += turn.given
        if not ids:
            raise ValueError(f"turn {i} begins without any token before it")
        if end > turn.begin:
            spans.append((len(ids), turn.begin, end - turn.begin))
        ids += own[turn.begin : end]
        ends.append((number, len(ids)))
    return [Segment(ids[: spans[-1][0] + spans[-1][2]], spans) for ids, spans in sequences if spans]
