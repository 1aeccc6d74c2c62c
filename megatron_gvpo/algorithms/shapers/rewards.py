"""Shapers of the reward by its value, its components and its likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.base import Component
from megatron_gvpo.algorithms.shapers.base import Shaper, each, rewarded, value_of
from megatron_gvpo.groups import Group, Rollout

_MOST_EXPONENT = 20.0  # the largest exponent of a soft logarithm; e^710 is infinite


class Affine(Shaper):
    """r' = scale r + shift: [0, 1] for BNPO; lambda and -1 of W-REINFORCE are scale 1 + lambda, shift -1.

    The expected reward of the prompt (`algorithm.prior`) changes in the same way.
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


class Unlikeliness(Shaper):
    """r' = r (1 - beta rank / k), rank 0 the least likely of the group (arXiv 2506.02355).

    The likelihood is the mean log-prob a token by the engine that sampled. So right answers that the policy
    seldom gives count more. Responses that no engine sampled keep their reward, and do not count in k.
    """

    needs_engine_logprobs: ClassVar[bool] = True

    name: Literal["unlikeliness"] = "unlikeliness"
    beta: float = Field(0.25, ge=0, le=1)

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def shaped(group: Group) -> Group:
            known = {i: fmean(r.logprobs) for i, r in enumerate(group.rollouts) if r.logprobs}
            rewards = group.rewards
            for rank, i in enumerate(sorted(known, key=known.__getitem__)):
                rewards[i] *= 1 - self.beta * rank / len(known)
            return rewarded(group, rewards)

        return [shaped(group) for group in groups]


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
    how: Literal["blend", "add"] = "blend"  # selects one of the two formulas
    relative: bool = False

    @property
    def components_read(self) -> tuple[Component, ...]:
        return (self.outcome, self.bonus)

    @property
    def replaces_rewards(self) -> bool:
        return self.how == "blend"

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

    @property
    def replaces_rewards(self) -> bool:
        return True

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
    """TempSamp-R1's soft reshaping (arXiv 2509.18056): little difference above `tau`, and much below it.

    r' = tau + high ln(r - tau + 1) for r >= tau, tau - (exp(low (tau - r)) - 1) / low below. The paper's
    constants, and its form below tau, were not found: these are a choice. An exponent is at most 20.
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
            return self.tau - math.expm1(min(-self.low * above, _MOST_EXPONENT)) / self.low

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


# Information-consistent GRPO: paraphrases of a question should be answered with as much information.


class InformationConsistency(Shaper):
    """r_i - coef |H_i - mean of H over the responses to all paraphrases|.

    H_i is the mean surprisal of the response's tokens under the policy that sampled it, in nats: an estimate
    of its entropy that needs no model. Paraphrases are prompts of the batch with the same value in the data
    record's field `across`. Responses that no engine sampled have no H and keep their reward. The paper's
    abstract inspired this shaper; the run's own reward stands for the paper's reward of helpfulness.
    """

    needs_engine_logprobs: ClassVar[bool] = True

    name: Literal["information_consistency"] = "information_consistency"
    across: str
    coef: float = Field(0.5, ge=0)

    @property
    def record_fields(self) -> dict[str, str]:
        return {"across": self.across}

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        of_variants: dict[str, list[float]] = {}
        for group in groups:
            known = [surprisal(rollout) for rollout in group.rollouts]
            of_variants.setdefault(self._key(group), []).extend(h for h in known if h is not None)
        means = {key: fmean(values) for key, values in of_variants.items() if values}
        return [
            rewarded(
                group, [self._reward(rollout, means.get(self._key(group))) for rollout in group.rollouts]
            )
            for group in groups
        ]

    def _key(self, group: Group) -> str:
        value = group.prompt.record.get(self.across)
        return f"alone: {group.prompt.id}" if value is None else f"of: {value}"

    def _reward(self, rollout: Rollout, mean: float | None) -> float:
        h = surprisal(rollout)
        return rollout.reward if h is None or mean is None else rollout.reward - self.coef * abs(h - mean)


def surprisal(rollout: Rollout) -> float | None:
    """Mean of -log p over the tokens, in nats; None if no engine gave log-probs."""
    return -fmean(rollout.logprobs) if rollout.logprobs else None
