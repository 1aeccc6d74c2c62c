"""ARISE: the policy writes a library of skills, chooses from it and is rewarded for using it.

The source is the authors' public code.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_gvpo.algorithms.base import RunSizes, only_with
from megatron_gvpo.algorithms.members.base import Member, MemberContext, any_right, ask_each
from megatron_gvpo.groups import Group, Prompt, Rollout


class Skill(NamedTuple):
    """A piece of advice. Its name is its first line; its utility measures how much it has helped."""

    name: str
    text: str
    utility: float


class Skills(Member):
    """Add to every group a second group: `n` responses to its prompt with a skill from a growing library.

    Choice: the policy scores each skill's text by its mean log-prob after the prompt. A softmax turns the
    scores divided by `sharpness` into probabilities. If none reaches `gate`, the prompt gets no skill.
    Otherwise it gets the most probable skill, or with probability `explore` a random one.

    Reward: a right response with a skill gains `bonus` if it mentions the skill's name. Then the skill's
    utility moves by a tenth towards 1 if only the group with the skill has a right response, 0.5 if both
    groups have one, 0 if neither has, and -1 if only the group without the skill has.

    Growth: for `new` prompts with a right response, the policy is asked to sum up its best response as a
    skill, whose first line is its name. If there are more than `size` skills, the least useful ones are
    dropped. Up to step `after_step` skills are only collected. Checkpoints contain the library.

    In conversations the skill is added to the first message, and the environment is the same. The policy sums
    up the messages of both sides, and its answer in the first turn is the skill.
    """

    needs_policy_logprobs: ClassVar[bool] = True
    takes_conversations: ClassVar[bool] = True
    adds_groups: ClassVar[bool] = True
    gives_components: ClassVar[bool] = False  # the bonus is in none of them

    name: Literal["skills"] = "skills"
    n: PositiveInt = 4
    sharpness: float = Field(1.0, gt=0)
    explore: float = Field(0.1, ge=0, le=1)
    gate: float = Field(0.35, ge=0, le=1)
    bonus: float = 1.0
    size: PositiveInt = 10
    new: PositiveInt = 2
    after_step: NonNegativeInt = 500
    template: str = "\n\nA skill that may help:\n{skill}"  # is added to the prompt
    # is added to the prompt to request a summary; {best} is replaced by the best response
    summary_template: str = (
        "\n\nA right answer:\n{best}\n\nSum up the skill behind it, its name on the first line."
    )
    right: float = 0.5  # a reward above this is right

    @model_validator(mode="after")
    def _possible(self) -> Skills:
        if "{skill}" not in self.template or "{best}" not in self.summary_template:
            raise ValueError("template needs {skill} in it, and summary_template {best}")
        return self

    @property
    def ineffective_options(self) -> dict[str, str]:
        # The most probable skill is the most probable one at any sharpness.
        return only_with(sharpness=(self.gate > 0, "gate above 0"))

    def idle_in(self, run: RunSizes) -> str | None:
        if self.after_step < run.steps:
            return None
        return f"after_step={self.after_step}: in train.steps={run.steps} skills are collected and never used"

    def build(self) -> Library:
        return Library(self)


class Library:
    """The skills of a run, and the work of each step with them."""

    def __init__(self, options: Skills) -> None:
        self._options = options
        self.skills: list[Skill] = []

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        tried = self._tried(groups, context) if context.step > self._options.after_step else {}
        joined: list[Group] = []
        for g, group in enumerate(groups):
            joined.append(group)
            if g in tried:
                skill, with_skill = tried[g]
                joined.append(self._rewarded(with_skill, skill))
        for g, (skill, with_skill) in tried.items():
            right = self._options.right
            self._judge(skill, any_right(with_skill, right), any_right(groups[g], right))
        self._learn(groups, context)
        return joined

    def _tried(self, groups: Sequence[Group], context: MemberContext) -> dict[int, tuple[Skill, Group]]:
        options, rng = self._options, random.Random(context.seed)
        if not self.skills:
            return {}
        texts = [context.encode(skill.text) for skill in self.skills]
        prompts = [group.prompt for group in groups for _ in self.skills]
        scores = context.mean_logp(prompts, texts * len(groups))
        chosen: dict[int, Skill] = {}
        prompts_with: dict[int, Prompt | None] = {}
        for g, group in enumerate(groups):
            share = softmax([s / options.sharpness for s in scores[g * len(texts) : (g + 1) * len(texts)]])
            if max(share) < options.gate:
                continue
            should_explore = rng.random() < options.explore
            chosen[g] = self.skills[rng.randrange(len(texts)) if should_explore else share.index(max(share))]
            text = options.template.replace("{skill}", chosen[g].text)
            prompts_with[g] = context.extended(group.prompt, text)
        answers = ask_each(context, prompts_with, options.n)
        return {g: (chosen[g], group) for g, group in answers.items() if group.rollouts}

    def _rewarded(self, group: Group, skill: Skill) -> Group:
        """Return the group with `bonus` added to the right responses that mention the skill's name."""
        options = self._options
        rollouts = [
            replace(r, reward=r.reward + options.bonus * (r.reward > options.right and skill.name in r.text))
            for r in group.rollouts
        ]
        return replace(group, rollouts=rollouts, prior=None)

    def _judge(self, skill: Skill, with_it: bool, without: bool) -> None:
        for i, known in enumerate(self.skills):
            if known.name == skill.name:
                utility = 0.9 * known.utility + 0.1 * counterfactual_utility(with_it, without)
                self.skills[i] = known._replace(utility=utility)

    def _learn(self, groups: Sequence[Group], context: MemberContext) -> None:
        options, prompts = self._options, dict[int, Prompt | None]()
        solved = [g for g, group in enumerate(groups) if any_right(group, options.right)]
        for g in solved[: options.new]:
            best = max(groups[g].rollouts, key=lambda rollout: rollout.reward)
            text = options.summary_template.replace("{best}", _spoken(best))
            prompts[g] = context.extended(groups[g].prompt, text)
        answered = ask_each(context, prompts, 1)
        for answer in (rollout for group in answered.values() for rollout in group.rollouts):
            text = str(answer.messages[0]["content"] if answer.messages else answer.text).strip()
            name = text.partition("\n")[0].strip()
            if name and name not in {skill.name for skill in self.skills}:
                self.skills.append(Skill(name, text, 0.0))
        while len(self.skills) > options.size:
            self.skills.remove(min(self.skills, key=lambda skill: skill.utility))

    def state_dict(self) -> dict[str, Any]:
        return {"skills": [list(skill) for skill in self.skills]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skills = [Skill(*skill) for skill in state.get("skills", ())]


def _spoken(rollout: Rollout) -> str:
    """Return the response's text, or in a conversation the messages of both sides."""
    return "\n".join(f"{m['role']}: {m['content']}" for m in rollout.messages) or rollout.text


def counterfactual_utility(with_it: bool, without: bool) -> float:
    """Return the value of a skill from two facts: was a response with it right, and was one without it?"""
    return {(True, False): 1.0, (True, True): 0.5, (False, False): 0.0, (False, True): -1.0}[with_it, without]


def softmax(values: Sequence[float]) -> list[float]:
    highest = max(values)
    powers = [math.exp(value - highest) for value in values]
    return [power / sum(powers) for power in powers]
