"""Made-up groups of rollouts, and their rows, for tests without a model.

A policy is the table of its token log-probs here, so gradients are dL/dlogp.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_gvpo.algorithms.base import Loss, token_weights
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.types import BatchTotals, TrainBatch


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


def make_rows(rewards: list[list[float]], lengths: list[int] | None = None, seed: int = 0) -> TrainBatch:
    """Rows of the given groups with random lengths, advantages and log-probs of other policies."""
    rng = random.Random(seed)
    n = sum(map(len, rewards))
    lengths = lengths or [rng.randint(1, 5) for _ in range(n)]
    generator = torch.Generator().manual_seed(seed)
    column_r = torch.randn(3, sum(lengths), generator=generator) * 0.2 - 1
    return TrainBatch(
        prompt_ids=[(1,)] * n,
        response_ids=[(2,) * length for length in lengths],
        group_n=torch.tensor([g for g, group in enumerate(rewards) for _ in group]),
        reward_n=torch.tensor([r for group in rewards for r in group], dtype=torch.float32),
        truncated_n=torch.zeros(n, dtype=torch.bool),
        advantage_n=torch.randn(n, generator=generator),
        old_logp_r=column_r[0],
        ref_logp_r=column_r[1],
        demonstration_n=torch.arange(n) % 3 == 1,
        item_r=torch.arange(sum(lengths)) % 2,
        engine_logp_r=column_r[0] + 0.5 * torch.randn(sum(lengths), generator=generator),
    )


def make_logp(rows: TrainBatch, seed: int = 1) -> torch.Tensor:
    count = int(rows.length_n.sum())
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.2 - 1


def sequence_weights(loss: Loss, rows: TrainBatch, logp_r: torch.Tensor) -> torch.Tensor:
    """dL/dl_i [n] of a loss that depends on sequence sums only."""
    weight_r, _ = token_weights(loss, rows, logp_r, BatchTotals.of(rows))
    first = torch.tensor(rows.offsets[:-1])
    torch.testing.assert_close(weight_r, weight_r[first][rows.seq_r], msg="weights differ inside a sequence")
    return weight_r[first]
