"""Rewards that are numbers of a conversation: what its environment paid, and what was counted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.settings.built_in_rewards import COUNT
from megatron_gvpo.workers.reward_functions import Component


def environment_reward(prompt: Prompt, rollout: Rollout) -> float:
    """The sum of the rewards of the environment's replies; 0 where the conversation ended without any."""
    return rollout.counts.get("environment_reward", 0.0)


def count(prompt: Prompt, rollout: Rollout, *, of: str) -> float:
    """The conversation's number of turns (`of` = "turns"), or its count of another name, such as tool_calls.

    0 where nothing was counted under that name. Raises ValueError for a response that is not a conversation.
    """
    if not rollout.turns:
        raise ValueError(f"{of} of a response that is no conversation")
    return float(len(rollout.turns)) if of == "turns" else rollout.counts.get(of, 0.0)


class NamedCounts:
    """The counts that components name, until a conversation has had them: a misspelt one would always be 0.

    Those in `known` need no check.
    """

    def __init__(self, components: Iterable[Component], known: Collection[str]) -> None:
        named = {c.options.get("of"): c.place for c in components if c.function == COUNT}
        self._places = {of: place for of, place in named.items() if of not in known}

    def check(self, groups: Sequence[Group]) -> None:
        """Look at the first batch in which a conversation came to its end.

        Raises ConfigError for a count that none of the batch's conversations has.
        """
        talks = [rollout for group in groups for rollout in group.rollouts if rollout.turns]
        if not self._places or not any(talk.finish_reason == "stop" for talk in talks):
            return  # cut off before an environment could count
        found = {name for talk in talks for name in talk.counts}
        for of, place in self._places.items():
            if of not in found:
                raise ConfigError(
                    f"rewards.components.{place}.options.of={of}: none of {len(talks)} conversations has "
                    f"such a count; they have: turns, {', '.join(sorted(found))}. Where it is rare, let the "
                    f"environment count 0 when there is none: counts={{{of!r}: 0}}"
                )
        self._places = {}
