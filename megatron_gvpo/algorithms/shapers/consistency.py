"""Information-consistent GRPO: paraphrases of a question should be answered with as much information."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.shapers.base import Shaper, rewarded
from megatron_gvpo.groups import Group, Rollout


class InformationConsistency(Shaper):
    """r_i - coef |H_i - mean of H over the responses to all paraphrases|.

    H_i is the mean surprisal of the response's tokens under the policy that sampled it, in nats: an estimate
    of its entropy that needs no model. Paraphrases are prompts of the batch with the same value in the data
    record's field `across`. Responses that no engine sampled have no H and keep their reward. Inspired by the
    abstract: what it rewards as helpful is the run's own reward here.
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
    """Mean of -log p over the tokens, in nats; None if no engine told log-probs."""
    return -fmean(rollout.logprobs) if rollout.logprobs else None
