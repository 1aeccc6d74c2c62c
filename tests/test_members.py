"""Who joins a group: replayed responses, demonstrations, responses to hints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from groups import make_group, rewards_of

from megatron_gvpo.algorithms.estimators import Estimator
from megatron_gvpo.algorithms.importance import TruncatedImportance
from megatron_gvpo.algorithms.members import Demonstration, Hinted, Replay
from megatron_gvpo.types import Group, Prompt, Rollout, Rows, Totals


class Asked:
    """An engine that answers by script: a prompt's responses are right if its text holds `answer`."""

    def __init__(self, step: int = 1, answer: str = "strong") -> None:
        self.step, self.seed, self.answer = step, 5, answer
        self.prompts: list[str] = []

    def ask(self, prompts: Sequence[Prompt], n: int) -> list[Group]:
        self.prompts += [prompt.text for prompt in prompts]
        return [
            Group(p, [Rollout([5], [-0.1], "five", "stop", 3, reward=float(self.answer in p.text))] * n)
            for p in prompts
        ]

    def extended(self, prompt: Prompt, text: str) -> Prompt:
        return replace(prompt, text=prompt.text + text)


def test_history_mixes_the_newest_earlier_responses_in():
    history = Replay(count=2).build()
    first, second = make_group([1, 2, 3]), make_group([4, 5])
    assert [rewards_of(g) for g in history([first, make_group([9], "q")], Asked())] == [[1, 2, 3], [9]]
    (mixed,) = history([second], Asked())
    assert rewards_of(mixed) == [4, 5, 2, 3]
    assert [r.source for r in mixed.rollouts] == ["policy", "policy", "replay", "replay"]
    (third,) = history([make_group([6])], Asked())
    assert rewards_of(third) == [6, 4, 5], "replayed responses are not stored again"


def test_history_survives_a_checkpoint():
    whole, interrupted, resumed = (Replay(count=3, keep=4).build() for _ in range(3))
    for history in (whole, interrupted):
        history([make_group([1, 2]), make_group([3], "q")], Asked())
    snapshot = interrupted.state_dict()
    interrupted([make_group([8])], Asked())
    resumed.load_state_dict(json.loads(json.dumps(snapshot)))
    assert resumed([make_group([5])], Asked()) == whole([make_group([5])], Asked())


@pytest.mark.parametrize("rewards", [[0, 0, 0, 0], [0, 1, 0, 0]])
def test_gcpo_injects_gold_where_every_response_fails(rewards):
    (group,) = Demonstration(when="all_wrong", place="replace")([make_group(rewards)], Asked())
    assert len(group.rollouts) == 4
    assert sorted(rewards_of(group), reverse=True) == [1, 0, 0, 0]
    sources = {rollout.source for rollout in group.rollouts}
    assert sources == ({"policy", "demonstration"} if max(rewards) == 0 else {"policy"})
    found = sorted(Estimator(scale="group_std")(Rows.from_groups([group]))[0].tolist(), reverse=True)
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_the_slot_of_a_demonstration():
    group = make_group([0, 0, 0], lengths=[2, 9, 3], reasons=["stop", "stop", "length"])

    def slot(**options) -> int:
        (joined,) = Demonstration(place="replace", **options)([group], Asked())
        return [r.source for r in joined.rollouts].index("demonstration")

    assert slot(slot="longest") == 1 and slot(slot="truncated") == 2
    assert slot(slot="random") == slot(slot="random"), "every rank chooses alike"


def test_a_demonstration_that_is_too_long_or_missing_stays_out():
    group = make_group([0, 0])
    assert Demonstration(max_tokens=1)([group], Asked()) == [group]
    bare = Group(replace(group.prompt, demonstration=None), group.rollouts)
    assert Demonstration()([bare], Asked()) == [bare]
    assert len(Demonstration().sized(2)([group], Asked())[0].rollouts) == 3


def test_a_demonstration_has_no_log_prob_of_an_engine():
    (group,) = Demonstration()([make_group([0, 1])], Asked())
    rows = Rows.from_groups([group])
    assert rows.demonstration_n.tolist() == [False, False, True]
    assert rows.engine_logp_r.isnan().tolist() == [False] * 4 + [True] * 2
    assert rows.sampled_by(0).tolist() == [True] * 4 + [False] * 2
    weight_r, _ = TruncatedImportance()(rows.with_columns(old_logp_r=torch.full((6,), -0.5)), Totals.of(rows))
    assert weight_r.tolist() == [1.0] * 6


HINTS = {"weak": "weak", "strong": "strong"}


def test_hints_are_tried_from_the_weakest_and_only_where_all_fail():
    asked = Asked()
    failed, solved = make_group([0, 0], record=HINTS), make_group([0, 1], record=HINTS)
    block = Hinted(fields=("weak", "strong"), n=2)
    groups = block([failed, solved], asked)
    assert asked.prompts == ["p\n\nHint: weak", "p\n\nHint: strong"]
    assert [rewards_of(group) for group in groups] == [[0, 0, 1, 1], [0, 1]]
    assert groups[0].prompt.text == "p", "the loss sees the prompt without the hint"
    assert [r.weight_version for r in groups[0].rollouts] == [0, 0, -1, -1]


def test_the_lowest_hint_that_succeeds_stays():
    asked = Asked(answer="weak")
    groups = Hinted(fields=("weak", "strong"), n=1)([make_group([0], record=HINTS)], asked)
    assert asked.prompts == ["p\n\nHint: weak"] and rewards_of(groups[0]) == [0, 1]


def test_scaf_grpo_replaces_one_wrong_response_by_a_right_one():
    group = make_group([0, 0, 0], record=HINTS)
    block = Hinted(fields=("strong",), n=4, place="replace", keep="right")
    assert rewards_of(block([group], Asked())[0]) == [1, 1, 1], "as many as are right"
    block = Hinted(fields=("strong",), n=1, place="replace", keep="right", after_step=50)
    assert rewards_of(block([group], Asked(step=50))[0]) == [0, 0, 0], "not while it warms up"
    assert rewards_of(block([group], Asked(step=51))[0]) == [0, 0, 1]


def test_igrpo_trains_the_refinements_of_the_best_draft():
    group = make_group([0.2, 0.9, 0.9], texts=["bad", "good", "same"])
    block = Hinted(best_draft=True, when="always", n=2, prompt="hinted", keep_group=False)
    (refined,) = block([group], asked := Asked(answer="good"))
    assert asked.prompts == ["p\n\nHint: good"]
    assert refined.prompt.text == "p\n\nHint: good" and rewards_of(refined) == [1, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "one of both"),
        ({"fields": ["a"], "best_draft": True}, "one of both"),
        ({"fields": ["a"], "template": "none"}, "no {hint}"),
        ({"fields": ["a"], "prompt": "hinted", "place": "replace"}, "a group of its own"),
    ],
)
def test_hints_that_mean_nothing(options, said):
    with pytest.raises(ValueError, match=said):
        Hinted(**options)
