"""V_0.5's budget: one response more where it would still make the baseline better (arXiv 2603.10848)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.members.base import Member, MemberContext
from megatron_gvpo.groups import Group


class OneMore(Member):
    """rollout.n responses to every prompt, then one at a time, up to `high`, while one more is worth `cost`.

    The rule looks one step ahead. With rewards on a scale of -1 to 1 (`low_reward` to `high_reward`), group
    mean m of k responses, prior V and D = max(0, (m - V)^2 - 1/k), the shrunk baseline's mean square error is
    D / (k D + 1); it is worth going on while that falls by more than `cost` from k to k + 1. That this
    is the error is our reading; 0.0039 is about 1/256, so that 15 or 16 responses are the most.
    """

    needs_prior: ClassVar[bool] = True

    name: Literal["one_more"] = "one_more"
    high: PositiveInt = 16
    cost: float = Field(0.0039, gt=0)
    low_reward: float = 0.0
    high_reward: float = 1.0

    @model_validator(mode="after")
    def _possible(self) -> OneMore:
        if self.low_reward >= self.high_reward:
            raise ValueError(
                f"low_reward={self.low_reward} must be below high_reward={self.high_reward}: rewards are "
                "measured between them"
            )
        return self

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        grown = list(groups)
        while wanting := [g for g, group in enumerate(grown) if self._wants(group)]:
            answers = context.ask([grown[g].prompt for g in wanting], 1)
            for g, more in zip(wanting, answers, strict=True):
                grown[g] = replace(grown[g], rollouts=[*grown[g].rollouts, *more.rollouts])
        return grown

    def _wants(self, group: Group) -> bool:
        if group.prior is None:
            raise ValueError("members: one_more needs the expected reward of a prompt: set algorithm.prior")
        distance = (self._scaled(fmean(group.rewards)) - self._scaled(group.prior)) ** 2
        k = len(group.rollouts)
        return k < self.high and expected_drop(distance, k) > self.cost

    def _scaled(self, reward: float) -> float:
        return 2 * (reward - self.low_reward) / (self.high_reward - self.low_reward) - 1


def expected_drop(distance: float, k: int) -> float:
    """By how much one more response than k lowers the error; `distance`: the squared distance (m - V)^2."""
    d = max(0.0, distance - 1 / k)
    return d / (k * d + 1) - d / ((k + 1) * d + 1)
