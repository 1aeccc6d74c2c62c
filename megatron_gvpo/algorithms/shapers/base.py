"""Shapers: functions of scored groups that change rewards, mask responses or drop them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import PositiveInt

from megatron_gvpo.algorithms.base import Block, Component
from megatron_gvpo.groups import Group, Rollout


class Shaper(Block):
    """Scored groups in, groups out, before the batch policy sees them; it leaves its input unchanged.

    `step` counts from 1. Shapers run in the order of the list `algorithm.shapers`, on every rank alike,
    except for those with `outside`.
    """

    needs_rewards: ClassVar[bool] = True
    # True if the shaper changes the rewards of responses.
    changes_rewards: ClassVar[bool] = True
    # True if a user's function, which may call a model, changes rewards only: it is called on one rank.
    outside: ClassVar[bool] = False

    name: str

    @property
    def replaces_rewards(self) -> bool:
        """True if the new rewards do not depend on those before."""
        return False

    @property
    def reads_rewards(self) -> bool:
        """True if what it does depends on the rewards, and not on their components alone."""
        return not self.replaces_rewards

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        raise NotImplementedError


class SizedShaper(Shaper):
    """A shaper that must know how long a response may be."""

    max_tokens: PositiveInt | None = None  # null: rollout.max_tokens

    @property
    def unset_length(self) -> str | None:
        return "max_tokens" if self.max_tokens is None else None

    @property
    def limit(self) -> int:
        assert self.max_tokens is not None, "the longest response is not known here (Block.sized)"
        return self.max_tokens


def rewarded(group: Group, rewards: Sequence[float]) -> Group:
    """Return the group with other rewards; the rewards' components stay."""
    rollouts = [replace(rollout, reward=float(r)) for rollout, r in zip(group.rollouts, rewards, strict=True)]
    return replace(group, rollouts=rollouts)


def each(groups: Sequence[Group], reward: Callable[[Rollout], float]) -> list[Group]:
    """Replace every response's reward by a function of the response."""
    return [rewarded(group, [reward(rollout) for rollout in group.rollouts]) for group in groups]


def value_of(rollout: Rollout, component: Component | None) -> float:
    """A component of the reward, or the whole reward for None. Raises ValueError for an unknown one."""
    if component is None:
        return rollout.reward
    values: Mapping[Any, float] = rollout.rewards
    if isinstance(component, int):
        values = dict(enumerate(rollout.rewards.values()))
    if component not in values:
        known = ", ".join(rollout.rewards) or "none"
        raise ValueError(f"algorithm: no reward component {component!r}; there are: {known}")
    return values[component]
