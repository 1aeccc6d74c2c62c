"""HiLL: the policy learns to write hints that also help it to answer without them (arXiv 2604.00698)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.base import check_call, only_with
from megatron_gvpo.algorithms.members.base import Member, MemberContext, any_right, ask_each
from megatron_gvpo.core.template import filled
from megatron_gvpo.groups import Group, Prompt, Rollout


class LearnedHint(Member):
    """If every response fails, the policy writes `hints` hints and answers `n` times with each of them.

    The hints form a group of their own, and are trained. The responses with the best hint replace the failed
    group. A hint's reward is

        (1 - p^n - (1 - p)^n) exp(min(D, 0) / temperature),

    where p is the share of right responses with the hint, and D the mean over these right responses y of
    mean log pi(y | prompt) - mean log pi(y | prompt, hint). So a hint gains little if its right responses are
    likely only with it. The reward is 0 if no response is right, and `penalty` if the hint is empty, too long
    or gives the answer away. The paper trains two models; here the policy has both roles.

    `template` requests a hint: {failed} is replaced by a failed response, {solution} by the field `solution`
    of the data record. `hint_template` is added to the prompt: {hint} is replaced by the text between <hint>
    and </hint>, or by the complete text without these marks.

    If `function` is set, `function(groups, n, **options)` returns n hints for each failed group, as for the
    member `teacher`. The best hint is chosen in the same way, and the hints are not trained.
    """

    needs_policy_logprobs: ClassVar[bool] = True
    adds_groups: ClassVar[bool] = True

    name: Literal["learned_hint"] = "learned_hint"
    hints: PositiveInt = 4
    n: PositiveInt = 8
    temperature: float = Field(0.3, gt=0)
    penalty: float = Field(-0.2, le=0)
    template: str = (
        "\n\nA failed attempt:\n{failed}\n\nWrite a short hint that helps without giving the answer away."
    )
    solution: str | None = None
    hint_template: str = "\n\nHint: {hint}"
    function: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    right: float = 0.5  # a reward above this is right

    @model_validator(mode="after")
    def _possible(self) -> LearnedHint:
        if "{hint}" not in self.hint_template:
            raise ValueError("hint_template has no {hint} in it")
        if ("{solution}" in self.template) != (self.solution is not None):
            raise ValueError("solution, the field of the data record, goes with {solution} in the template")
        if self.function is not None:
            check_call(self.function, ("groups", "n"), self.options)
        return self

    @property
    def ineffective_options(self) -> dict[str, str]:
        asks = self.function is None, "hints of the policy, function=null"
        return only_with(
            options=(self.function is not None, "function"), template=asks, solution=asks, penalty=asks
        )

    @property
    def gives_components(self) -> bool:  # type: ignore[override]
        return self.function is not None  # hints of the policy are trained

    @property
    def record_fields(self) -> dict[str, str]:
        return {} if self.solution is None else {"solution": self.solution}

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        failed = [g for g, group in enumerate(groups) if not any_right(group, self.right)]
        written = self._written(groups, failed, context) if failed else {}
        tried = self._tried(groups, written, context)
        joined: list[Group] = []
        for g, group in enumerate(groups):
            if g not in written:
                joined.append(group)
                continue
            of_hints = [tried.get((g, h)) for h in range(len(written[g].rollouts))]
            best = max((trial for trial in of_hints if trial), key=lambda trial: trial.reward, default=None)
            joined.append(group if best is None or best.reward <= 0 else best.group)
            if self.function is None:
                rewards = [self.penalty if trial is None else trial.reward for trial in of_hints]
                hints = [replace(r, reward=v) for r, v in zip(written[g].rollouts, rewards, strict=True)]
                joined.append(replace(written[g], rollouts=hints, prior=None))
        return joined

    def _written(
        self, groups: Sequence[Group], failed: Sequence[int], context: MemberContext
    ) -> dict[int, Group]:
        """Return the hints for the failed groups, as rollouts, by the index of the group."""
        if self.function is not None:
            texts = context.texts(self.function, [groups[g] for g in failed], self.hints, self.options)
            hints = [[Rollout([], [], text or "", "stop", -1) for text in written] for written in texts]
            return {g: Group(groups[g].prompt, written) for g, written in zip(failed, hints, strict=True)}
        requests = {g: context.extended(groups[g].prompt, self._request(groups[g])) for g in failed}
        return ask_each(context, requests, self.hints)

    def _request(self, group: Group) -> str:
        fields = {"failed": group.rollouts[0].text}
        if self.solution is not None:
            fields["solution"] = str(group.prompt.record.get(self.solution, ""))
        return filled(self.template, fields)

    def _tried(
        self, groups: Sequence[Group], written: dict[int, Group], context: MemberContext
    ) -> dict[tuple[int, int], Trial]:
        """Answer with each valid hint; returns the results by (index of the group, index of the hint)."""
        prompts: dict[tuple[int, int], Prompt | None] = {}
        for g, of_group in written.items():
            for h, rollout in enumerate(of_group.rollouts):
                hint, answer = hint_in(rollout.text), groups[g].prompt.answer
                if not hint or (answer and gives_away(hint, answer)):
                    continue
                text = self.hint_template.replace("{hint}", hint)
                prompts[g, h] = context.extended(groups[g].prompt, text)
        answers = ask_each(context, prompts, self.n)
        right: list[tuple[tuple[int, int], Rollout]] = [
            (key, rollout)
            for key, group in answers.items()
            for rollout in group.rollouts
            if rollout.reward > self.right
        ]
        responses = [rollout.token_ids for _, rollout in right]
        plain = context.mean_logp([groups[g].prompt for (g, _), _ in right], responses)
        hinted = context.mean_logp([answers[key].prompt for key, _ in right], responses)
        reliance: dict[tuple[int, int], list[float]] = {}
        for (key, _), without, with_hint in zip(right, plain, hinted, strict=True):
            reliance.setdefault(key, []).append(without - with_hint)
        return {
            key: Trial(
                group,
                transfer_reward(
                    len(reliance.get(key, [])) / self.n,
                    self.n,
                    fmean(reliance.get(key, [0.0])),
                    self.temperature,
                ),
            )
            for key, group in answers.items()
        }


class Trial(NamedTuple):
    """The responses to a prompt with a hint, and the reward of the hint."""

    group: Group
    reward: float


def transfer_reward(p: float, n: int, reliance: float, temperature: float) -> float:
    """(1 - p^n - (1 - p)^n) exp(min(reliance, 0) / temperature)"""
    return (1 - p**n - (1 - p) ** n) * math.exp(min(reliance, 0.0) / temperature)


def hint_in(text: str) -> str:
    """Return the text between <hint> and </hint>, or the complete text without these marks."""
    marked = re.search(r"<hint>(.*?)</hint>", text, re.IGNORECASE | re.DOTALL)
    return (marked[1] if marked else text).strip()


def gives_away(hint: str, answer: str) -> bool:
    """True if a hint states the answer. An answer of one or two characters must follow "=", "is" or similar.

    This is the authors' rule: many hints contain "2" without giving the answer 2 away.
    """
    answer = answer.strip()
    if not answer or len(answer) > 2:
        return bool(answer) and answer.lower() in hint.lower()
    text = re.escape(answer)
    pattern = rf"(=|\b(is|equals|equal to|answer:))\s*{text}(?!\w)|\\boxed\{{{text}\}}"
    return re.search(pattern, hint, re.IGNORECASE) is not None
