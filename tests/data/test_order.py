"""Prompts are drawn by the success of earlier responses, which the tracker remembers."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from helpers.inputs.rows import make_group

from megatron_gvpo.algorithms.curriculum.prompts import SuccessRate
from megatron_gvpo.algorithms.curriculum.tracker import Tracker
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.order import PromptOrder, SuccessTracker, WeightedOrder
from megatron_gvpo.groups import Prompt

PROMPTS = [Prompt(str(i), (1,), str(i), record={"rate": i / 3}) for i in range(4)]


def learned(*rewards: list[float]) -> SuccessTracker:
    tracker = SuccessTracker(Tracker())
    tracker.learn([make_group(group, str(i)) for i, group in enumerate(rewards)])
    return tracker


def order(tracker: SuccessTracker, **options: object) -> WeightedOrder:
    return WeightedOrder(PROMPTS, 0, SuccessRate(**options), tracker)


def test_hard_prompts_come_more_often_and_none_is_lost():
    tracker = learned([0] * 8, [0, 1] * 4, [1] * 8, [1] * 8)
    drawn = Counter(i for _ in range(3000) for i in order_of(tracker))
    assert drawn[0] > drawn[1] > drawn[2] > 0
    expected = [1 - tracker.known(prompt).success + 0.05 for prompt in PROMPTS]
    shares = [drawn[i] / 3000 for i in range(4)]
    assert shares == pytest.approx([w / sum(expected) for w in expected], abs=0.03)


_orders: dict[int, WeightedOrder] = {}


def order_of(tracker: SuccessTracker) -> list[int]:
    return _orders.setdefault(id(tracker), order(tracker, favour="hard")).take(1)


def test_a_batch_repeats_no_prompt_unless_it_is_larger_than_the_data():
    draws = order(learned(), favour="medium")
    assert sorted(draws.take(4)) == [0, 1, 2, 3]
    counts = Counter(draws.take(10))
    assert sum(counts.values()) == 10 and min(counts.values()) >= 2


def test_weight_zero_comes_last():
    tracker = learned([0] * 8, [0, 1], [1] * 8, [1] * 8)
    assert order(tracker, favour="medium", floor=0.0).take(1) == [1]


def test_a_stated_rate_holds_until_the_first_visit():
    tracker = learned([1, 1])
    assert tracker.known(PROMPTS[1], "rate").success == pytest.approx(1 / 3)
    assert tracker.known(PROMPTS[1]) is None
    assert tracker.known(PROMPTS[0], "rate") == pytest.approx((1.0, 2.9 / 3.8, 3.8))


def test_the_prior_is_what_was_expected_before_the_batch():
    tracker = SuccessTracker(Tracker(low=-1, high=1))
    assert tracker.expected_reward(PROMPTS[0]) == 0
    tracker.learn([make_group([1, 1], "0")])
    assert tracker.expected_reward(PROMPTS[0]) == pytest.approx(2 * 2.9 / 3.8 - 1)


def test_only_the_policys_own_responses_are_learned_from():
    group = make_group([1, 0], "0")
    group.rollouts[0].source = "demonstration"
    tracker = SuccessTracker(Tracker())
    tracker.learn([group])
    assert tracker.known(PROMPTS[0]) == pytest.approx((0.0, 0.9 / 2.8, 2.8))


def test_draws_go_on_after_a_checkpoint():
    uninterrupted, interrupted = (order(learned([0, 1]), favour="hard") for _ in range(2))
    assert (
        uninterrupted.take(2) == interrupted.take(2)
        and uninterrupted.seed_for_next() == interrupted.seed_for_next()
    )
    tracker = SuccessTracker(Tracker())
    tracker.load_state_dict(json.loads(json.dumps(learned([0, 1]).state_dict())))
    resumed = order(tracker, favour="hard")
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert [resumed.take(3) for _ in range(5)] == [uninterrupted.take(3) for _ in range(5)]
    with pytest.raises(
        DataError, match=r"trained on 9 prompts, and data\.train now has 4: resume with the same"
    ):
        resumed.load_state_dict({"count": 9, "draws": 1})


def test_another_order_of_the_same_prompts_begins_anew():
    """As when a run by weight is continued by a method that takes the prompts in turn, or the other way."""
    in_turn, by_weight = PromptOrder(4, 0), order(learned([0, 1]), favour="hard")
    first_epoch, first_draw = in_turn.take(4), by_weight.take(3)
    other, new = PromptOrder(4, 0), order(learned([0, 1]), favour="hard")
    other.load_state_dict(by_weight.state_dict())
    new.load_state_dict(in_turn.state_dict())
    assert (other.take(4), new.take(3)) == (first_epoch, first_draw)
    with pytest.raises(DataError, match=r"trained on 4 prompts, and data\.train now has 9"):
        PromptOrder(9, 0).load_state_dict(by_weight.state_dict())


@pytest.mark.parametrize("rate", [75, -0.1, "0.5", True])
def test_a_stated_rate_is_no_percentage(rate: object):
    """With a weight below 0, the prompts that should come last would come first."""
    prompts = [*PROMPTS, Prompt("p7", (1,), "", record={"rate": rate})]
    with pytest.raises(
        DataError, match=r"prompt p7: field 'rate' \(algorithm.prompts.field\) is .*from 0 to 1"
    ):
        WeightedOrder(prompts, 0, SuccessRate(field="rate"), learned())
