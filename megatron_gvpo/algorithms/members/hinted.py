"""Adds responses to the prompt with a hint, which comes from the data or is the group's best response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.base import RunSizes, only_with
from megatron_gvpo.algorithms.members.base import Member, MemberContext, any_right, ask_each, taught
from megatron_gvpo.groups import Group, Prompt


class Hinted(Member):
    """`n` responses to the prompt with a hint join the group, either always or if every response failed.

    `fields` of the data record have the hints, from the weakest to the strongest. A stronger hint is tried if
    the weaker ones led to no right response; the responses to the last hint that was tried join the group.
    With `best_draft` the hint is the group's own best response (iGRPO). `template` is added to the prompt,
    with the hint in place of `{hint}`; if the prompt would be longer than data.max_prompt_tokens, it gets no
    hint.

    prompt  own     the responses are trained as responses to the prompt without the hint (Guide, arXiv
                    2506.13923)
            hinted  they are trained as responses to the prompt with the hint, in a group of their own
            (iGRPO);
                    the original group is trained only if `keep_group` is true
    place   add, or replace: each takes the place of a wrong response (Scaf-GRPO, arXiv 2510.19807)
    source  policy, or demonstration: then the loss treats the responses as solutions from the data
    keep    all responses with a hint join the group, or only the right ones
    """

    name: Literal["hinted"] = "hinted"
    fields: tuple[str, ...] = ()
    best_draft: bool = False
    when: Literal["always", "all_wrong"] = "all_wrong"  # the groups that get a hint
    n: PositiveInt = 4
    template: str = "\n\nHint: {hint}"
    prompt: Literal["own", "hinted"] = "own"
    place: Literal["add", "replace"] = "add"
    source: Literal["policy", "demonstration"] = "policy"
    keep: Literal["all", "right"] = "all"
    keep_group: bool = True
    after_step: int = Field(0, ge=0)  # the last step without hints
    right: float = 0.5  # a reward above this is right

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if bool(self.fields) == self.best_draft:
            raise ValueError(
                "hinted needs `fields`, the hints in the data record, or `best_draft`, and not both"
            )
        if "{hint}" not in self.template:
            raise ValueError("template has no {hint} in it")
        if self.prompt == "hinted" and (self.place == "replace" or self.keep == "right"):
            raise ValueError("prompt=hinted makes a group of its own: place=add and keep=all go with it")
        return self

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(
            keep_group=(self.prompt == "hinted", "prompt=hinted"),
            source=(self.prompt == "own", "prompt=own"),
            right=(self._reads_right, "when=all_wrong, place=replace, keep=right, or several fields"),
        )

    @property
    def _reads_right(self) -> bool:
        several = not self.best_draft and len(self.fields) > 1
        return several or self.when == "all_wrong" or self.place == "replace" or self.keep == "right"

    def idle_in(self, run: RunSizes) -> str | None:
        if self.after_step < run.steps:
            return None
        return f"after_step={self.after_step}: no step of train.steps={run.steps} gets hints"

    @property
    def brings_demonstrations(self) -> bool:  # type: ignore[override]
        return self.prompt == "own" and self.source == "demonstration"

    @property
    def brings_hinted(self) -> bool:  # type: ignore[override]
        return self.prompt == "own" and self.source == "policy"

    @property
    def adds_groups(self) -> bool:  # type: ignore[override]
        return self.prompt == "hinted"

    @property
    def record_fields(self) -> dict[str, str]:
        return {f"fields.{i}": field for i, field in enumerate(self.fields)}

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        if context.step <= self.after_step:
            return list(groups)
        hinted: dict[int, Group] = {}
        for level in range(1 if self.best_draft else len(self.fields)):
            prompts: dict[int, Prompt | None] = {}
            for g, group in enumerate(groups):
                hint = self._hint(group, level) if self._wants(group, hinted.get(g)) else None
                if hint is not None:
                    prompts[g] = context.extended(group.prompt, self.template.replace("{hint}", hint))
            hinted |= ask_each(context, prompts, self.n)
        joined: list[Group] = []
        for g, group in enumerate(groups):
            joined += self._joined(group, hinted[g]) if g in hinted else [group]
        return joined

    def _wants(self, group: Group, hinted: Group | None) -> bool:
        if hinted is not None:
            return not any_right(hinted, self.right)
        return self.when == "always" or not any_right(group, self.right)

    def _hint(self, group: Group, level: int) -> str | None:
        if self.best_draft:
            return max(group.rollouts, key=lambda rollout: rollout.reward).text or None
        hint = group.prompt.record.get(self.fields[level])
        return None if hint is None else str(hint)

    def _joined(self, group: Group, hinted: Group) -> list[Group]:
        if self.prompt == "hinted":
            return [group, hinted] if self.keep_group else [hinted]
        taken_over = [r for r in hinted.rollouts if self.keep == "all" or r.reward > self.right]
        rollouts = list(group.rollouts)
        if self.place == "replace":
            wrong = [i for i, rollout in enumerate(rollouts) if rollout.reward <= self.right]
            taken_over = taken_over[: len(wrong)]
            taken = set(wrong[: len(taken_over)])
            rollouts = [rollout for i, rollout in enumerate(rollouts) if i not in taken]
        return [replace(group, rollouts=[*rollouts, *taught(taken_over, self.source)])]
