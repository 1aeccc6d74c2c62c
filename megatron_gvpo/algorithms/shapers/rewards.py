"""Shapers of the reward that look at a response, or at its group, and its length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.base import Component
from megatron_gvpo.algorithms.shapers.base import Shaper, SizedShaper, each, rewarded, value_of
from megatron_gvpo.types import Group, Rollout


class Affine(Shaper):
    """r' = scale r + shift: [0, 1] for BNPO; lambda and -1 of W-REINFORCE are scale 1 + lambda, shift -1.

    What was expected of the prompt (`algorithm.prior`) changes alike.
    """

    name: Literal["affine"] = "affine"
    scale: float = 1.0
    shift: float = 0.0

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        shaped = each(groups, lambda rollout: self._of(rollout.reward))
        return [
            replace(group, prior=None if group.prior is None else self._of(group.prior)) for group in shaped
        ]

    def _of(self, reward: float) -> float:
        return self.scale * reward + self.shift


class Overlong(SizedShaper):
    """DAPO's soft punishment of length (arXiv 2503.14476 eq. 13).

    r' = r + p: p is 0 up to max_tokens - buffer, falls to -1 at max_tokens, and stays there. buffer: null
    is a fifth of max_tokens, as the paper's 4096 of 20480.
    """

    name: Literal["overlong"] = "overlong"
    buffer: PositiveInt | None = None

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        buffer = self.buffer or self.limit / 5

        def penalty(length: int) -> float:
            return -min(max((length - (self.limit - buffer)) / buffer, 0.0), 1.0)

        return each(groups, lambda rollout: rollout.reward + penalty(len(rollout.token_ids)))


class Unlikeliness(Shaper):
    """r' = r (1 - beta rank / k), rank 0 the least likely of the group (arXiv 2506.02355).

    The likelihood is the mean log-prob a token by the engine that sampled. So among right answers those
    count more that the policy would seldom give.
    """

    name: Literal["unlikeliness"] = "unlikeliness"
    beta: float = Field(0.25, ge=0, le=1)

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def shaped(group: Group) -> Group:
            likelihood = [fmean(rollout.logprobs) if rollout.logprobs else 0.0 for rollout in group.rollouts]
            order = sorted(range(len(likelihood)), key=likelihood.__getitem__)
            rank = {i: position for position, i in enumerate(order)}
            k = len(group.rollouts)
            return rewarded(group, [r * (1 - self.beta * rank[i] / k) for i, r in enumerate(group.rewards)])

        return [shaped(group) for group in groups]


class ShortRight(Shaper):
    """GRPO-lambda: prefer short right answers where the group is good already (arXiv 2505.18086).

    The groups are ranked by their share of right answers. In the best `top` of them a right answer has
    1 - alpha sigmoid((L - mean) / std), mean and std of the lengths of the group's right answers (population
    std; 0.5 alpha where it is 0), a wrong one 0. The others keep their rewards. alpha is a third party's.
    """

    name: Literal["short_right"] = "short_right"
    top: float = Field(0.2, ge=0, le=1)
    alpha: float = Field(0.6, ge=0)
    right: float = 0.5

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

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        budget = max(1.0, self.start * self.decay ** ((step - 1) // self.every))

        def reward(rollout: Rollout) -> float:
            x = len(rollout.token_ids) / budget
            return rollout.reward + self.weight * max(0.0, x if x <= 1 else 2 - x)

        return each(groups, reward)


class FormatLength(SizedShaper):
    """Format and length in the place of an answer ("Surrogate Signals"): R_f + R_l if the format is right.

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

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def reward(rollout: Rollout) -> float:
            x, p = len(rollout.token_ids) / self.limit, self.turn
            of_length = 1 - (1 - x / p) ** 2 if x <= p else 1 - 2 * ((x - p) / (1 - p)) ** 2
            of_format = value_of(rollout, self.format)
            total = of_format + of_length
            return total if of_format > self.right else min(0.0, total)

        return each(groups, reward)


class Gate(Shaper):
    """A component of the reward that counts only where another one is positive.

    blend  r' = (1 - weight) outcome + weight bonus where outcome > 0, else 0: C-GRPO's rubrics
           ("Chaining the Evidence", weight 0.3); `relative` divides the bonus by the largest of the group's
           right answers
    add    r' = r + weight outcome bonus: Posterior-GRPO's thinking reward (weight 1)
    """

    name: Literal["gate"] = "gate"
    outcome: str
    bonus: str
    weight: float = 0.3
    how: Literal["blend", "add"] = "blend"
    relative: bool = False

    @property
    def components_read(self) -> tuple[Component, ...]:
        return (self.outcome, self.bonus)

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        return [rewarded(group, self._rewards(group)) for group in groups]

    def _rewards(self, group: Group) -> list[float]:
        outcome = [value_of(rollout, self.outcome) for rollout in group.rollouts]
        bonus = [value_of(rollout, self.bonus) for rollout in group.rollouts]
        if self.relative:
            largest = max((b for o, b in zip(outcome, bonus, strict=True) if o > 0), default=0.0)
            bonus = [b / largest if largest > 0 else b for b in bonus]
        if self.how == "add":
            return [r + self.weight * o * b for r, o, b in zip(group.rewards, outcome, bonus, strict=True)]
        return [
            (1 - self.weight) * o + self.weight * b if o > 0 else 0.0
            for o, b in zip(outcome, bonus, strict=True)
        ]


class Staged(Shaper):
    """r' = r_1 + r_2 + ... up to and with the first component below its threshold.

    Progressive reward shaping (PRS, arXiv 2512.07478). `stages`: (component, threshold) in their order, such
    as parse, tool format, correctness, quality.
    """

    name: Literal["staged"] = "staged"
    stages: tuple[tuple[str, float], ...] = Field(min_length=1)

    @property
    def components_read(self) -> tuple[Component, ...]:
        return tuple(component for component, _ in self.stages)

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def reward(rollout: Rollout) -> float:
            total = 0.0
            for component, threshold in self.stages:
                total += value_of(rollout, component)
                if value_of(rollout, component) < threshold:
                    break
            return total

        return each(groups, reward)


class SoftLog(Shaper):
    """TempSamp-R1's soft reshaping (arXiv 2509.18056): little difference above `tau`, much below it.

    r' = tau + high ln(r - tau + 1) for r >= tau, tau - (exp(low (tau - r)) - 1) / low below. The paper's
    constants, and its form below tau, were not found: these are a choice.
    """

    name: Literal["soft_log"] = "soft_log"
    tau: float = 0.5
    high: float = Field(0.5, gt=0)
    low: float = Field(1.0, gt=0)

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def reward(rollout: Rollout) -> float:
            above = rollout.reward - self.tau
            if above >= 0:
                return self.tau + self.high * math.log1p(above)
            return self.tau - math.expm1(-self.low * above) / self.low

        return each(groups, reward)


class SerialDecay(Shaper):
    """S-GRPO (arXiv 2505.07686): of a group's right answers, in order, the i-th has 1/2^i (i from 0).

    The order is that of the exits from one chain of thought, the earliest first.
    """

    name: Literal["serial_decay"] = "serial_decay"
    right: float = 0.5

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def rewards(group: Group) -> list[float]:
            before, shaped = 0, []
            for r in group.rewards:
                shaped.append(0.5**before if r > self.right else 0.0)
                before += r > self.right
            return shaped

        return [rewarded(group, rewards(group)) for group in groups]
