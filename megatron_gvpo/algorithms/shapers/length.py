"""Shapers of the reward by the length of a response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.base import Component, RunSizes
from megatron_gvpo.algorithms.shapers.base import Shaper, SizedShaper, each, rewarded, value_of
from megatron_gvpo.groups import Group, Rollout


class Overlong(SizedShaper):
    """DAPO's soft punishment of length (arXiv 2503.14476 eq. 13).

    r' = r + weight * p: p is 0 up to max_tokens - buffer, falls to -1 at max_tokens, and stays there. buffer:
    null is a fifth of max_tokens, as the paper's 4096 of 20480. The paper's rewards are -1 and 1: with
    rewards of 0 and 1, such as `math` has, a weight of 0.5 punishes length as much against accuracy.
    """

    name: Literal["overlong"] = "overlong"
    buffer: PositiveInt | None = None
    weight: float = Field(1.0, gt=0)  # the reduction of a reward by the full punishment

    def problem(self) -> str | None:
        if (self.buffer or 0) <= self.limit:
            return None
        return (
            f"buffer={self.buffer} exceeds the longest response, {self.limit} tokens: every response would "
            "be punished; null is a fifth"
        )

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        buffer = self.buffer or self.limit / 5

        def penalty(length: int) -> float:
            return -self.weight * min(max((length - (self.limit - buffer)) / buffer, 0.0), 1.0)

        return each(groups, lambda rollout: rollout.reward + penalty(len(rollout.token_ids)))


class ShortRight(Shaper):
    """GRPO-lambda: prefer short right answers where the group is good already (arXiv 2505.18086).

    The groups are ranked by their share of right answers. In the best `top` of them a right answer has 1 -
    alpha sigmoid((L - mean) / std), mean and std of the lengths of the group's right answers (population std;
    0.5 alpha where it is 0), a wrong one 0. The others keep their rewards. The default of alpha comes from a
    third party's implementation.
    """

    name: Literal["short_right"] = "short_right"
    top: float = Field(0.2, ge=0, le=1)
    alpha: float = Field(0.6, ge=0)
    right: float = 0.5

    def idle_in(self, run: RunSizes) -> str | None:
        if round(self.top * run.prompts):
            return None
        return f"top={self.top:g} of train.prompts_per_step={run.prompts} groups is none"

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        accuracy = [fmean(r > self.right for r in group.rewards) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: -accuracy[g])[: round(self.top * len(groups))]
        chosen = set(best)
        return [self._shaped(group) if g in chosen else group for g, group in enumerate(groups)]

    def _shaped(self, group: Group) -> Group:
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        of_right = [n for n, r in zip(lengths, group.rewards, strict=True) if r > self.right]
        if not of_right:
            return rewarded(group, [0.0] * len(lengths))
        mean, std = fmean(of_right), pstdev(of_right)

        def reward(length: int, r: float) -> float:
            z = (length - mean) / std if std else 0.0
            return 1 - self.alpha / (1 + math.exp(-z)) if r > self.right else 0.0

        return rewarded(group, [reward(n, r) for n, r in zip(lengths, group.rewards, strict=True)])


class LengthCurriculum(Shaper):
    """r' = r + weight tri(L / B), with a budget B = max(1, start decay^floor((step - 1) / every)) of tokens.

    tri(x) rises to 1 at x = 1, and falls to 0 at 2. From "Train Long, Think Short", whose
    weights of correctness, length and format are 0.6, 0.3, 0.1; `rewards.components` has the other two.
    """

    name: Literal["length_curriculum"] = "length_curriculum"
    start: float = Field(256.0, gt=0)
    decay: float = Field(0.7, gt=0, le=1)
    every: PositiveInt = 150
    weight: float = 0.3

    def idle_in(self, run: RunSizes) -> str | None:
        if self.every < run.steps or self.decay == 1:
            return None
        return f"every={self.every}: in train.steps={run.steps} the budget stays at start={self.start:g}"

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        budget = max(1.0, self.start * self.decay ** ((step - 1) // self.every))

        def reward(rollout: Rollout) -> float:
            x = len(rollout.token_ids) / budget
            return rollout.reward + self.weight * max(0.0, x if x <= 1 else 2 - x)

        return each(groups, reward)


class FormatLength(SizedShaper):
    """Format and length in place of an answer ("Surrogate Signals"): R_f + R_l if the format is right.

    x = L / max_tokens, R_l = 1 - (1 - x/turn)^2 up to `turn`, 1 - 2 ((x - turn) / (1 - turn))^2 after it.
    With a wrong format: min(0, R_f + R_l). R_f is the component `format`.
    """

    name: Literal["format_length"] = "format_length"
    turn: float = Field(0.5, gt=0, lt=1)
    format: str = "format"
    right: float = 0.5

    @property
    def components_read(self) -> tuple[Component, ...]:
        return (self.format,)

    @property
    def replaces_rewards(self) -> bool:
        return True

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def reward(rollout: Rollout) -> float:
            x, p = len(rollout.token_ids) / self.limit, self.turn
            of_length = 1 - (1 - x / p) ** 2 if x <= p else 1 - 2 * ((x - p) / (1 - p)) ** 2
            of_format = value_of(rollout, self.format)
            total = of_format + of_length
            return total if of_format > self.right else min(0.0, total)

        return each(groups, reward)
