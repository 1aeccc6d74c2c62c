"""Rewards for rerankers, as in GroupRank: a response scores documents in lines such as `[3]: 0.8`.

`prompt.record[key]` holds the documents' relevance, a list of numbers; documents are numbered from 1.
"""

from __future__ import annotations

import math
import re

from megatron_gvpo.groups import Prompt, Rollout

_SCORED = re.compile(r"\[(\d+)\]\s*:\s*(-?\d+(?:\.\d+)?)")


def ndcg(prompt: Prompt, rollout: Rollout, key: str = "relevance", k: int = 10) -> float:
    """NDCG@k of the documents in the order of their scores.

    The gain is the sum of (2^relevance - 1) / log2(rank + 1), divided by that of the ideal order. Documents
    without a score come last, ties in the order of their numbers. The result is 0 if no document is relevant.
    """
    relevance, score = _relevance(prompt, key), scores(rollout.text)
    order = sorted(range(1, len(relevance) + 1), key=lambda d: -score.get(d, -math.inf))
    ideal = _gain(sorted(relevance, reverse=True)[:k])
    return _gain([relevance[d - 1] for d in order[:k]]) / ideal if ideal else 0.0


def alignment(prompt: Prompt, rollout: Rollout, key: str = "relevance") -> float:
    """1 minus the mean distance of the scores from relevance / maximum; a missing score is 1 away."""
    relevance, score = _relevance(prompt, key), scores(rollout.text)
    highest = max(relevance) or 1.0
    distances = [
        min(abs(score[d] - r / highest), 1.0) if d in score else 1.0 for d, r in enumerate(relevance, 1)
    ]
    return 1 - sum(distances) / len(distances)


def listed(prompt: Prompt, rollout: Rollout, key: str = "relevance") -> float:
    """1 if the response scores every document exactly once and no other, else 0."""
    documents = [int(document) for document, _ in _SCORED.findall(rollout.text)]
    return float(sorted(documents) == list(range(1, len(_relevance(prompt, key)) + 1)))


def scores(text: str) -> dict[int, float]:
    """The first score that a text gives to each document."""
    first: dict[int, float] = {}
    for document, score in _SCORED.findall(text):
        first.setdefault(int(document), float(score))
    return first


def _gain(relevance: list[float]) -> float:
    return sum((2**r - 1) / math.log2(rank + 1) for rank, r in enumerate(relevance, 1))


def _relevance(prompt: Prompt, key: str) -> list[float]:
    values = prompt.record.get(key)
    if not isinstance(values, list) or not values:
        raise ValueError(f"prompt {prompt.id}: the field {key!r} is not a list of relevances")
    return [float(value) for value in values]
