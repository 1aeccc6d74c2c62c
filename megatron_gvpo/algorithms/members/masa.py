"""MASA: the policy also learns to predict how well it will answer (arXiv 2510.03259)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from megatron_gvpo.algorithms.members.base import Member, MemberContext, ask_each
from megatron_gvpo.core.plain_values import finite_number
from megatron_gvpo.groups import Group, Rollout


class Foresight(Member):
    """Add to every group a second group of `n` predictions about the first, rewarded for their accuracy.

    `template` is added to the prompt and requests a JSON object with pass_rate, length (in tokens) and
    notions (words that a good answer needs). The reward of such an object is the mean of

        pass_rate  0.01^|p' - p|, where p' is the prediction and p the share of right responses in the group
        length     1 if it lies between the lengths of the shortest and the longest right response, else 0
        notions    the share of the notions that occur in more right responses than wrong ones; notions that
                   occur in the prompt do not count

    and 0 for any other text. A prompt that is too long with the template gets no predictions. In a later
    phase the paper uses the predictions to drop prompts and cut responses; its public code lacks this phase,
    and so does this member.
    """

    adds_groups: ClassVar[bool] = True
    gives_components: ClassVar[bool] = False

    name: Literal["foresight"] = "foresight"
    n: PositiveInt = 16
    template: str = (
        "\n\nDo not answer yet. Foresee how you will do, as JSON: "
        '{"pass_rate": 0 to 1, "length": tokens, "notions": ["..."]}'
    )
    right: float = 0.5  # a reward above this is right

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        questions = {g: context.extended(group.prompt, self.template) for g, group in enumerate(groups)}
        predictions = ask_each(context, questions, self.n)
        joined: list[Group] = []
        for g, group in enumerate(groups):
            joined.append(group)
            if g in predictions:
                joined.append(self._scored(predictions[g], group))
        return joined

    def _scored(self, predictions: Group, group: Group) -> Group:
        rollouts = [
            replace(rollout, reward=foreseen(rollout.text, group, self.right))
            for rollout in predictions.rollouts
        ]
        return replace(predictions, rollouts=rollouts, prior=None)


def foreseen(text: str, group: Group, right: float = 0.5) -> float:
    """Return the reward, in [0, 1], of a prediction about `group`."""
    claims = prediction(text)
    if claims is None:
        return 0.0
    good = [rollout for rollout in group.rollouts if rollout.reward > right]
    bad = [rollout for rollout in group.rollouts if rollout.reward <= right]
    of_rate = pass_rate_reward(claims.get("pass_rate"), len(good) / len(group.rollouts))
    lengths = [len(rollout.token_ids) for rollout in good]
    length = finite_number(claims.get("length"))
    of_length = float(bool(lengths) and length is not None and min(lengths) < length < max(lengths))
    notions = claims.get("notions")
    words = {str(word).lower() for word in notions} if isinstance(notions, list) else set[str]()

    def having(word: str, among: Sequence[Rollout]) -> int:
        return sum(word in rollout.text.lower() for rollout in among)

    new_words = [word for word in words if word not in group.prompt.text.lower()]
    of_notions = fmean([having(word, good) > having(word, bad) for word in new_words] or [0.0])
    return (of_notions + of_rate + of_length) / 3


def pass_rate_reward(claim: Any, rate: float) -> float:
    """0.01^|claim - rate|; 0 if `claim` is not a number."""
    number = finite_number(claim)
    return 0.0 if number is None else float(0.01 ** abs(number - rate))


def prediction(text: str) -> dict[str, Any] | None:
    """Return the last JSON object in a text that contains no other object, or None."""
    for braces in reversed(re.findall(r"\{[^{}]*\}", text)):
        try:
            value = json.loads(braces)
        except (ValueError, RecursionError):  # a model may nest JSON too deep for the parser
            continue
        if isinstance(value, dict):
            return value
    return None
