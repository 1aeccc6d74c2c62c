"""The reward: 1 for the right result in the last turn."""

from __future__ import annotations

from megatron_gvpo.groups import Prompt, Rollout


def right(prompt: Prompt, rollout: Rollout) -> float:
    return float(rollout.messages[-1]["content"] == f"{{{prompt.answer}}}")
