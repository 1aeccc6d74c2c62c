"""Rewards that are numbers of a conversation: the rewards of its environment, and its counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.settings.rewards import COUNT, RewardConfig


def environment_reward(prompt: Prompt, rollout: Rollout) -> float:
    """The sum of the rewards of the environment's replies; 0 if the conversation ended without any."""
    return rollout.counts.get("environment_reward", 0.0)


def count(prompt: Prompt, rollout: Rollout, *, of: str) -> float:
    """The conversation's number of turns (`of` = "turns"), or its count of another name, such as tool_calls.

    The result is 0 if no count has that name. Raises ValueError for a response that is not a conversation.
    """
    if not rollout.turns:
        raise ValueError(f"{of} of a response that is not a conversation")
    return float(len(rollout.turns)) if of == "turns" else rollout.counts.get(of, 0.0)


class NamedCounts:
    """Checks the counts that components name when conversations first report counts, for misspelt names.

    `components` are given by their indices in rewards.components. Counts in `known` need no check.
    """

    def __init__(self, components: Mapping[int, RewardConfig], known: Collection[str]) -> None:
        names = {c.options.get("of"): i for i, c in components.items() if c.function == COUNT}
        self._unseen = {name: i for name, i in names.items() if name not in known}

    def check(self, groups: Sequence[Group]) -> None:
        """Check the names in the first batch with a conversation that was not cut off.

        Raises ConfigError for a count that no conversation of the batch reports.
        """
        conversations = [rollout for group in groups for rollout in group.rollouts if rollout.turns]
        if not self._unseen or not any(c.finish_reason == "stop" for c in conversations):
            return  # the conversation was cut off before the environment counted anything
        counted = {name for conversation in conversations for name in conversation.counts}
        for name, i in self._unseen.items():
            if name not in counted:
                raise ConfigError(
                    f"rewards.components.{i}.options.of={name}: none of {len(conversations)} conversations "
                    f"has such a count; they have: turns, {', '.join(sorted(counted))}. Where it is rare, "
                    f"let the environment count 0 when there is none: counts={{{name!r}: 0}}"
                )
        self._unseen = {}
