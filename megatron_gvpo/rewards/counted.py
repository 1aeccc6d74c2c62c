"""Rewards that are numbers of a conversation: what its environment paid, and what was counted."""

from __future__ import annotations

from megatron_gvpo.groups import Prompt, Rollout


def environment_reward(prompt: Prompt, rollout: Rollout) -> float:
    """The sum of the rewards of the environment's replies; 0 where the conversation ended without any."""
    return rollout.counts.get("environment_reward", 0.0)


def count(prompt: Prompt, rollout: Rollout, *, of: str) -> float:
    """The conversation's number of turns (`of` = "turns"), or its count of another name, such as tool_calls.

    0 where nothing was counted under that name. Raises ValueError for a response that is no conversation.
    """
    if not rollout.turns:
        raise ValueError(f"{of} of a response that is no conversation")
    return float(len(rollout.turns)) if of == "turns" else rollout.counts.get(of, 0.0)
