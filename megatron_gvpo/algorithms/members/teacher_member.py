"""Responses of another model that join a group."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.base import unless
from megatron_gvpo.algorithms.members.base import Member, MemberContext
from megatron_gvpo.core.user_functions import check_call, load_function
from megatron_gvpo.groups import Group, Rollout


class TeacherMember(Member):
    """Responses of another model, or of any function that gives texts, scored by the run's rewards.

    `function(groups, n, **options)` -> n texts for each group, a list of lists, where None is for a text that
    it does not have, such as one that was cut off: it would be ended. The function is called on one rank. It
    sees the prompts and the policy's own responses with their rewards, so it may continue or correct one. For
    a model behind an OpenAI-compatible URL: "megatron_gvpo.api_model:chat", options {url, model}.

    `share`: of the groups, drawn at random, that get a teacher; `when`: all of these, or where all failed.
    """

    name: Literal["teacher"] = "teacher"
    function: str
    options: dict[str, Any] = Field(default_factory=dict)
    n: PositiveInt = 1
    share: float = Field(1.0, gt=0, le=1)
    when: Literal["always", "all_wrong"] = "always"
    right: float = 0.0  # a reward above this is right

    @model_validator(mode="after")
    def _callable(self) -> Self:
        check_call(load_function(self.function), "f(groups, n, **options)", 2, self.options)
        return self

    @property
    def idle_options(self) -> dict[str, str]:
        return unless(right=(self.when == "all_wrong", "when=all_wrong"))

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        rng = random.Random(context.seed)
        chosen = [
            g
            for g, group in enumerate(groups)
            if rng.random() < self.share
            and (self.when == "always" or all(reward <= self.right for reward in group.rewards))
        ]
        if not chosen:
            return list(groups)
        texts = context.texts(self.function, [groups[g] for g in chosen], self.n, self.options)
        taught = [
            Group(
                groups[g].prompt,
                [
                    Rollout(context.encode_response(t), [], t, "stop", -1, source="demonstration")
                    for t in demonstrations
                    if t is not None
                ],
            )
            for g, demonstrations in zip(chosen, texts, strict=True)
        ]
        context.score(taught)
        joined = list(groups)
        for g, demonstrations in zip(chosen, taught, strict=True):
            joined[g] = replace(groups[g], rollouts=[*groups[g].rollouts, *demonstrations.rollouts])
        return joined
