"""Metrics of a step's responses: rewards, lengths, staleness."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from megatron_gvpo.types import Group


def rollout_statistics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return means over all responses of the batch; `version` is the policy's that they will train.

    Staleness is the number of steps since the oldest weights that sampled a part of the response.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = [rollout for rollout in rollouts if rollout.source == "policy" and rollout.weight_version >= 0]
    staleness = [version - rollout.weight_version for rollout in sampled] or [0]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    statistics = {
        "reward/mean": fmean(rollout.reward for rollout in rollouts),
        "reward/groups_with_signal": fmean(len(set(group.rewards)) > 1 for group in groups),
        "reward/errors": float(sum(bool(rollout.reward_errors) for rollout in rollouts)),
        "response/length": fmean(lengths),
        "response/truncated": fmean(rollout.finish_reason == "length" for rollout in rollouts),
        "response/weight_version": fmean(rollout.weight_version for rollout in sampled or rollouts),
        "response/staleness": fmean(staleness),
        "response/staleness_max": float(max(staleness)),
        "response/carried": fmean(len(rollout.spans) > 1 for rollout in rollouts),
        "response/from_policy": len(sampled) / len(rollouts),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.rewards}):
        scored = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
        statistics[f"reward/{name}"] = fmean(scored)
    return statistics


def trained_tokens(groups: Sequence[Group]) -> int:
    """Return the number of prompt and response tokens that go through the model in training."""
    return sum(
        len(group.prompt.token_ids) + len(rollout.token_ids) for group in groups for rollout in group.rollouts
    )
