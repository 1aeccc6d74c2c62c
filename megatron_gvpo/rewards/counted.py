"""The reward that the environment of a conversation gave."""

from __future__ import annotations

from megatron_gvpo.groups import Prompt, Rollout


def environment_reward(prompt: Prompt, rollout: Rollout) -> float:
    """The sum of the rewards of the environment's replies; 0 where the conversation ended without any."""
    return rollout.counts.get("environment_reward", 0.0)
