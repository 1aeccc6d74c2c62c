"""Made-up groups of rollouts, for tests of code that works on groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_gvpo.groups import Group, Prompt, Rollout


def make_group(
    rewards: Sequence[float],
    name: str = "p",
    *,
    lengths: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    texts: Sequence[str] | None = None,
    reasons: Sequence[str] | None = None,
    components: Mapping[str, Sequence[float]] | None = None,
    record: Mapping[str, Any] | None = None,
) -> Group:
    """A group with these rewards; `logprobs` gives the log-prob of each response's every token."""
    lengths = lengths or [2] * len(rewards)
    rollouts = [
        Rollout(
            [7] * length,
            [logprobs[i] if logprobs else -0.5] * length,
            texts[i] if texts else "",
            reasons[i] if reasons else "stop",
            reward=float(rewards[i]),
            rewards={key: float(values[i]) for key, values in (components or {}).items()},
        )
        for i, length in enumerate(lengths)
    ]
    return Group(Prompt(name, (1, 2), name, "2", demonstration=(3, 4), record=dict(record or {})), rollouts)


def rewards_of(group: Group) -> list[float]:
    return [rollout.reward for rollout in group.rollouts]


def longer(prompt: Prompt, a: Rollout, b: Rollout) -> float:
    """Judge that prefers the longer response."""
    return float(len(a.token_ids) > len(b.token_ids))
