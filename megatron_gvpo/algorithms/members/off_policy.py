"""Members that the current policy did not sample: demonstrations, earlier responses, a teacher's texts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.base import WithFunction, only_with
from megatron_gvpo.algorithms.members.base import Member, MemberContext, any_right
from megatron_gvpo.groups import Group, Rollout, demonstrated, rollout_fields, rollout_of

# The solution in the data set joins the group (arXiv 2504.19599, section 4.1).


class Demonstration(Member):
    """The solution in the data set joins the group with the reward `reward`.

    when   always, or all_wrong: only if no reward is above `right` (GCPO, arXiv 2510.07790)
    place  add, or replace: the solution takes the place of the response at `slot`
    slot   random, longest, or truncated: the first truncated response, or a random one if none is truncated
    A solution longer than `max_tokens` (null: rollout.max_tokens) does not join.
    """

    needs_engine: ClassVar[bool] = False
    needs_demonstrations: ClassVar[bool] = True
    brings_demonstrations: ClassVar[bool] = True
    gives_components: ClassVar[bool] = False

    name: Literal["demonstration"] = "demonstration"
    when: Literal["always", "all_wrong"] = "always"
    place: Literal["add", "replace"] = "add"
    slot: Literal["random", "longest", "truncated"] = "random"
    reward: float = 1.0
    right: float = 0.5  # a reward above this is right
    max_tokens: PositiveInt | None = None

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(
            slot=(self.place == "replace", "place=replace"),
            right=(self.when == "all_wrong", "when=all_wrong"),
        )

    @property
    def unset_length(self) -> str | None:
        return "max_tokens" if self.max_tokens is None else None

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        return [self._joined(group, context.seed + i) for i, group in enumerate(groups)]

    def _joined(self, group: Group, seed: int) -> Group:
        prompt = group.prompt
        too_long = self.max_tokens is not None and prompt.demonstration_length > self.max_tokens
        needless = self.when == "all_wrong" and any_right(group, self.right)
        if prompt.demonstration is None or too_long or needless:
            return group
        demonstration = demonstrated(prompt, self.reward, "demonstration", -1)  # -1: not the policy's
        rollouts = list(group.rollouts)
        if self.place == "add":
            return replace(group, rollouts=[*rollouts, demonstration])
        rollouts[self._slot(rollouts, seed)] = demonstration
        return replace(group, rollouts=rollouts)

    def _slot(self, rollouts: Sequence[Rollout], seed: int) -> int:
        if self.slot == "longest":
            return max(range(len(rollouts)), key=lambda i: len(rollouts[i].token_ids))
        truncated = [i for i, r in enumerate(rollouts) if r.finish_reason == "length"]
        if self.slot == "truncated" and truncated:
            return truncated[0]
        return random.Random(seed).randrange(len(rollouts))


# GVPO's history: earlier responses to a prompt join its group (arXiv 2504.19599, Figure 4).


class Replay(Member):
    """The `count` newest earlier responses to the same prompt join each group.

    A prompt that is new in the run has no earlier responses, so its group is smaller. Rewards are stored with
    the response. Log-probs under the reference, which GVPO needs, are computed again.
    """

    name: Literal["replay"] = "replay"
    count: PositiveInt = 1

    def build(self) -> History:
        return History(self.count)


class History:
    """The newest responses to every prompt, as dicts of `Rollout`'s fields, which checkpoints can store."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._stored: dict[str, tuple[dict[str, Any], ...]] = {}

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        joined = []
        for group in groups:
            stored = self._stored.get(group.prompt.id, ())
            own = [r for r in group.rollouts if r.source == "policy"]
            new = tuple(rollout_fields(replace(r, source="replay", routing=None)) for r in own)
            self._stored[group.prompt.id] = (*stored, *new)[-self._count :]
            earlier = [rollout_of(fields) for fields in stored[-self._count :]]
            joined.append(replace(group, rollouts=[*group.rollouts, *earlier]))
        return joined

    def state_dict(self) -> dict[str, Any]:
        return dict(self._stored)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stored = {prompt: tuple(stored) for prompt, stored in state.items()}


# Responses of another model join a group.


class TeacherMember(WithFunction, Member):
    """Texts of another model, or of any function, join the groups and are scored by the run's rewards.

    `function(groups, n, **options)` returns a list of n texts for each group. It returns None in place of a
    text that is missing or was cut off, because an end token is added to every text. The function is called
    on one rank. It sees the prompts and the policy's own responses with their rewards, so it may continue or
    correct one. For a model behind an OpenAI-compatible URL, use "megatron_gvpo.api_model:chat" with the
    options {url, model}.

    `share`: the share of the groups, drawn at random, that may get a teacher's texts. `when`: all of these
    groups get them, or only those in which every response failed.
    """

    arguments: ClassVar[tuple[str, ...]] = ("groups", "n")
    brings_demonstrations: ClassVar[bool] = True

    name: Literal["teacher"] = "teacher"
    n: PositiveInt = 1
    share: float = Field(1.0, gt=0, le=1)
    when: Literal["always", "all_wrong"] = "always"
    right: float = 0.5  # a reward above this is right

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(right=(self.when == "all_wrong", "when=all_wrong"))

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        rng = random.Random(context.seed)
        chosen = [
            g
            for g, group in enumerate(groups)
            if rng.random() < self.share and (self.when == "always" or not any_right(group, self.right))
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
