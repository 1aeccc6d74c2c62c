"""Samples more responses to the prompts for which they are most useful.

V_0.5 samples one more response while it still improves the baseline (arXiv 2603.10848). XRPO samples in
rounds, to the prompts whose mean reward is the least certain (arXiv 2510.06672).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.base import RunSizes
from megatron_gvpo.algorithms.members.base import Member, MemberContext
from megatron_gvpo.groups import Group


class OneMore(Member):
    """Sample rollout.n responses to every prompt, then one at a time while that reduces an error enough.

    The error is that of the shrunk baseline: its mean square error is D / (k D + 1) for k responses, where D
    = max(0, (m - V)^2 - 1/k), m is the group's mean reward and V the prior, both on a scale from -1
    (`low_reward`) to 1 (`high_reward`). A prompt gets one more response while the error falls by more than
    `cost` from k to k + 1, and at most `high` responses. The paper does not state the error; this formula is
    an interpretation. The default of `cost` is about 1/256, with which a prompt gets at most 15 or 16
    responses.
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

    def idle_in(self, run: RunSizes) -> str | None:
        if run.responses < self.high:
            return None
        return f"high={self.high}: a prompt has rollout.n={run.responses} responses already, and gets no more"

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
    """Return the decrease of the error from k to k + 1 responses, where `distance` is (m - V)^2."""
    d = max(0.0, distance - 1 / k)
    return d / (k * d + 1) - d / ((k + 1) * d + 1)


class Rounds(Member):
    """Sample rollout.n responses to every prompt, then more in `rounds` rounds: `extra` a prompt, on average.

    Each response of a round goes to the prompt with the largest

        h(n) - h(n + 1) + explore sqrt(log(1 + T) / n),    h(n) = t s / sqrt(n),

    where n counts the prompt's responses, those of this round included, s is the sample standard deviation of
    its known rewards, and t is the 1 - alpha / 2 quantile of Student's distribution with n - 1 degrees of
    freedom. So h is half the width of the mean reward's confidence interval. T is the number of responses in
    the batch, as in UCB1. Prompts with one response come first, because s is unknown for them.
    """

    name: Literal["rounds"] = "rounds"
    rounds: PositiveInt = 2
    extra: PositiveInt = 4
    explore: float = Field(0.1, ge=0)
    alpha: float = Field(0.05, gt=0, lt=1)

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        grown = list(groups)
        for _ in range(self.rounds):
            shares = self.shares([group.rewards for group in grown], self.extra * len(grown))
            numbers = [g for g, share in enumerate(shares) for _ in range(share)]
            answers = context.ask([grown[g].prompt for g in numbers], 1)
            for g, more in zip(numbers, answers, strict=True):
                grown[g] = replace(grown[g], rollouts=[*grown[g].rollouts, *more.rollouts])
        return grown

    def shares(self, rewards: Sequence[Sequence[float]], budget: int) -> list[int]:
        """Divide `budget` responses among the prompts, given the rewards of their responses so far."""
        spread = [stdev(known) if len(known) > 1 else 0.0 for known in rewards]
        bonus = self.explore**2 * math.log1p(sum(map(len, rewards)))

        def priority(i: int, n: int) -> float:
            if n < 2:
                return math.inf
            narrower = half_width(n, spread[i], self.alpha) - half_width(n + 1, spread[i], self.alpha)
            return narrower + math.sqrt(bonus / n)

        shares = [0] * len(rewards)
        queue = [(-priority(i, len(known)), i) for i, known in enumerate(rewards)]
        heapq.heapify(queue)
        for _ in range(budget):
            _, i = queue[0]
            shares[i] += 1
            heapq.heapreplace(queue, (-priority(i, len(rewards[i]) + shares[i]), i))
        return shares


def half_width(n: int, std: float, alpha: float) -> float:
    """Return half the width of the confidence interval of the mean of n >= 2 values with sample std `std`."""
    return student_quantile(n - 1, alpha) * std / math.sqrt(n)


@cache
def student_quantile(freedom: int, alpha: float) -> float:
    """Return t with P(|T| < t) = 1 - alpha, where T has Student's distribution with `freedom` degrees.

    It is computed by bisection of the finite series for P (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, freedom) < 1 - alpha else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _central(angle: float, freedom: int) -> float:
    """Return P(|T| < t) for t = sqrt(freedom) tan(angle)."""
    odd = freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = 0.0
    for j in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (j - 1) / j * math.cos(angle) ** 2
    return 2 / math.pi * (angle + total) if odd else total
