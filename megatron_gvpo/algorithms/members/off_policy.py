"""Members that the present policy did not sample: demonstrations, replayed responses, a teacher's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.base import WithFunction, unless
from megatron_gvpo.algorithms.members.base import Member, MemberContext, any_right
from megatron_gvpo.groups import Group, Rollout, demonstrated, rollout_fields, rollout_of

# The data set's own solution as a member of the group (arXiv 2504.19599, section 4.1).


class Demonstration(Member):
    """The data set's own solution joins the group with `reward`, or takes the place of a response.

    when   always, or all_wrong: where no response is better than `right` (GCPO, arXiv 2510.07790)
    place  add, or replace, which leaves the group its size, the response at `slot`: a random one, the
           longest, or the first truncated one (a random one without any)
    A solution longer than `max_tokens` (null: rollout.max_tokens) stays out.
    """

    needs_engine: ClassVar[bool] = False
    needs_demonstrations: ClassVar[bool] = True
    gives_components: ClassVar[bool] = False

    name: Literal["demonstration"] = "demonstration"
    when: Literal["always", "all_wrong"] = "always"
    place: Literal["add", "replace"] = "add"
    slot: Literal["random", "longest", "truncated"] = "random"
    reward: float = 1.0
    right: float = 0.0
    max_tokens: PositiveInt | None = None

    @property
    def idle_options(self) -> dict[str, str]:
        return unless(
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
        demonstration = demonstrated(prompt, self.reward, "demonstration", -1)  # no weights sampled it
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


# GVPO's history: earlier responses to a prompt that join its group (arXiv 2504.19599, Figure 4).


class Replay(Member):
    """`count` earlier responses to the same prompt join each group, the newest first.

    A prompt that was not seen before has none: its group is smaller. Rewards are stored with the response;
    its log-probs under the reference are computed again, as GVPO needs them. `keep`: how many responses
    to a prompt are kept, and written into checkpoints.
    """

    name: Literal["replay"] = "replay"
    count: PositiveInt = 1
    keep: PositiveInt | None = None  # null: count

    def build(self) -> History:
        return History(self.count, max(self.count, self.keep or self.count))


class History:
    """The newest responses to every prompt, as the fields of their `Rollout`: what a checkpoint writes."""

    def __init__(self, count: int, keep: int) -> None:
        self._count, self._keep = count, keep
        self._stored: dict[str, tuple[dict[str, Any], ...]] = {}

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        joined = []
        for group in groups:
            stored = self._stored.get(group.prompt.id, ())
            own = [r for r in group.rollouts if r.source == "policy"]
            new = tuple(rollout_fields(replace(r, source="replay", routing=None)) for r in own)
            self._stored[group.prompt.id] = (*stored, *new)[-self._keep :]
            earlier = [rollout_of(fields) for fields in stored[-self._count :]]
            joined.append(replace(group, rollouts=[*group.rollouts, *earlier]))
        return joined

    def state_dict(self) -> dict[str, Any]:
        return dict(self._stored)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stored = {prompt: tuple(stored) for prompt, stored in state.items()}


# Responses of another model that join a group.


class TeacherMember(WithFunction, Member):
    """Responses of another model, or of any function that gives texts, scored by the run's rewards.

    `function(groups, n, **options)` -> n texts for each group, a list of lists, where None is for a text that
    it does not have, such as one that was cut off: it would be ended. The function is called on one rank. It
    sees the prompts and the policy's own responses with their rewards, so it may continue or correct one. For
    a model behind an OpenAI-compatible URL: "megatron_gvpo.api_model:chat", options {url, model}.

    `share`: of the groups, drawn at random, that get a teacher; `when`: all of these, or where all failed.
    """

    arguments: ClassVar[tuple[str, ...]] = ("groups", "n")

    name: Literal["teacher"] = "teacher"
    n: PositiveInt = 1
    share: float = Field(1.0, gt=0, le=1)
    when: Literal["always", "all_wrong"] = "always"
    right: float = 0.0  # a reward above this is right

    @property
    def idle_options(self) -> dict[str, str]:
        return unless(right=(self.when == "all_wrong", "when=all_wrong"))

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
