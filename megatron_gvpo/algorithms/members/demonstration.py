"""The data set's own solution as a member of the group (arXiv 2504.19599, section 4.1)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import PositiveInt

from megatron_gvpo.algorithms.base import unless
from megatron_gvpo.algorithms.members.base import Member, MemberContext
from megatron_gvpo.groups import Group, Rollout, demonstrated


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
        needless = self.when == "all_wrong" and any(r > self.right for r in group.rewards)
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
