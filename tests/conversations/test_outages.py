"""Conversations that were lost to outages leave their groups, and members of a method get what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.groups import LOST, Group, Prompt, Rollout
from megatron_gvpo.sampling.batch_sampler import BatchContext
from megatron_gvpo.sampling.samplers import Outages


def test_lost_conversations_leave_their_groups_before_anyone_sees_them() -> None:
    def group(*reasons: str) -> Group:
        return Group(Prompt("p", (5,), "?"), [Rollout([], [], "down", reason) for reason in reasons])

    outages = Outages(most=0.6)
    remaining = outages.taken_out([group("stop", "stop", LOST), group("stop", LOST), group("stop")])
    assert [len(g.rollouts) for g in remaining] == [2, 1], "a group of one by itself stays"
    assert outages.metrics == {"env/lost": pytest.approx(1 / 3), "env/dropped_groups": 1.0}
    with pytest.raises(RolloutError, match=r"2 of 3 conversations were lost .* 2 of them to: down"):
        outages.taken_out([group("stop", LOST, LOST)])


def test_the_few_responses_that_members_ask_for_may_all_be_lost() -> None:
    """Fails on the old code: one lost conversation of a request for one was all of it, and ended the run."""
    outages = Outages(most=None)
    assert outages.taken_out([Group(Prompt("p", (5,), "?"), [Rollout([], [], "down", LOST)])]) == []
    assert outages.taken_out([]) == [], "nothing is left for the judges to score"


def test_a_member_that_asks_gets_an_empty_group_where_all_were_lost() -> None:
    class Losing:
        """Loses every conversation about b."""

        def begin(self, prompts: Sequence[Prompt], seed: int) -> Sequence[Prompt]:
            return prompts

        def finish(self, prompts: Sequence[Prompt]) -> list[Group]:
            rollouts = [Rollout([5], [-0.5], "", "stop"), Rollout([5], [-0.5], "", "stop")]
            gone = [Rollout([], [], "down", LOST)] * 2
            groups = [Group(p, gone if p.id == "b" else list(rollouts)) for p in prompts]
            return Outages(most=None).taken_out(groups)

    unused: Any = None
    losing: Any = Losing()
    context = BatchContext(1, 0, lambda n: losing, unused, 0, unused)
    questions = [Prompt(name, (5,), "?") for name in "abac"]
    replies = context.ask(questions, 2)
    assert [g.prompt for g in replies] == questions and [len(g.rollouts) for g in replies] == [2, 0, 2, 2]
    assert context.ask(questions[1:2], 2) == [Group(questions[1], [])]
