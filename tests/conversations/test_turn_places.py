"""Where contexts begin, compared with a search through all that was said; and what that takes of memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

from megatron_gvpo.conversations.converse import SharedPrefix, TurnEnds
from megatron_gvpo.conversations.dialogue import AnsweredCalls
from megatron_gvpo.groups import Rollout


def common(first: Sequence[int], second: Sequence[int]) -> int:
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


def searched(ends: list[tuple[int, ...]], context: tuple[int, ...]) -> SharedPrefix:
    shared = [common(end, context) for end in ends]
    i = max(range(len(ends)), key=lambda i: (shared[i], shared[i] == len(ends[i]), i))
    return SharedPrefix(i - 1, None if shared[i] == len(ends[i]) else shared[i], shared[i])


def test_places_are_those_of_a_search_through_everything() -> None:
    for seed in range(300):
        rng = random.Random(seed)

        def tokens(least: int, rng: random.Random = rng) -> tuple[int, ...]:
            return tuple(rng.randrange(2) for _ in range(rng.randint(least, 4)))

        sequences = [tokens(1)]  # what the prompt and every turn ended with
        ends = TurnEnds(sequences[0])
        for _ in range(8):
            before = rng.choice(sequences)
            context = (*before[: rng.randint(0, len(before))], *tokens(0)) or (1,)
            prefix, sampled = ends.shared_prefix(context), tokens(1)
            assert prefix == searched(sequences, context)
            ends.add(prefix, context[prefix.length :], sampled)
            sequences.append((*context, *sampled))
            assert [ends.end(turn) for turn in range(len(sequences) - 1)] == sequences[1:]


def test_a_long_chat_is_kept_once() -> None:
    """Sixty calls, each with all that was before: 300,000 tokens, and 60 times 100,000 characters."""
    tracemalloc.start()
    calls, context, chat = AnsweredCalls((5,) * 100), (5,) * 100, []
    for i in range(60):
        response = Rollout([i] * 80, [-0.5] * 80, "", "stop", 1)
        chat = [*chat, {"role": "user", "content": f"{i}" * 2000}]
        # A program sends its messages anew with every call.
        sent = [{**m, "content": "".join(list(m["content"]))} for m in chat]
        calls.add(context, response, messages=sent)
        context = (*context, *response.token_ids, *(7,) * 80)
    traced_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    rollout = calls.rollout(calls.without_retries())
    assert len(rollout.turns) == 60 and sum(len(turn.given) for turn in rollout.turns) == 59 * 80
    assert traced_bytes < 1_500_000
