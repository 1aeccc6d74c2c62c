"""A batch policy decides when a sampled batch is trained on, and which groups wait for the next one."""

from __future__ import annotations

import json

import pytest

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.curriculum.batch_policy import Accumulate, KeepAll, is_valid
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.types import TrainBatch


def make_group(rewards: list[float], name: str = "p") -> Group:
    prompt = Prompt(name, (1, 2), "1+1=", "2", demonstration=(3, 4), record={"level": 1})
    return Group(prompt, [Rollout([5, 6], [-0.1, -0.2], "2", "stop", reward=r) for r in rewards])


VALID, RIGHT, WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


def test_keep_all_passes_every_batch_unchanged():
    policy = KeepAll().build(2)
    batch = [make_group(WRONG), make_group(VALID), make_group(RIGHT)]
    assert policy.offer(batch) == batch


def test_enough_valid_groups_train_at_once():
    batch = [make_group(WRONG), make_group(VALID), make_group(VALID), make_group(VALID), make_group(RIGHT)]
    policy = Accumulate(threshold=0.6).build(5)
    assert policy.offer(batch) == batch
    assert policy.metrics == {"rounds": 1, "valid_groups": 3, "dropped_groups": 0, "gave_up": 0}


def test_too_few_valid_groups_wait_for_another_batch():
    first = [make_group(VALID, "a"), *[make_group(WRONG)] * 4]
    second = [make_group(RIGHT, "b"), make_group(VALID, "c"), make_group(WRONG, "d"), make_group(VALID, "e")]
    policy = Accumulate(threshold=0.6).build(5)
    assert policy.offer(first) is None
    batch = policy.offer([*second, make_group(RIGHT, "f")])
    assert [group.prompt.id for group in batch] == ["a", "b", "c", "d", "e"]  # filled up to 5, in order
    assert policy.metrics == {"rounds": 2, "valid_groups": 3, "dropped_groups": 5, "gave_up": 0}
    assert policy.offer([make_group(WRONG)] * 5) is None  # a new batch begins with nothing pending


def test_no_valid_group_is_thrown_away():
    policy = Accumulate(threshold=1.0).build(3)
    assert policy.offer([make_group(VALID), make_group(VALID), make_group(WRONG)]) is None
    batch = policy.offer([make_group(VALID), make_group(VALID), make_group(RIGHT)])
    assert len(batch) == 4 and all(map(is_valid, batch))


def test_accumulation_gives_up_after_max_rounds_and_says_so():
    policy = Accumulate(max_rounds=3).build(2)
    assert policy.offer([make_group(WRONG)] * 2) is None
    assert policy.offer([make_group(WRONG)] * 2) is None
    assert len(policy.offer([make_group(WRONG)] * 2)) == 2
    assert policy.metrics == {"rounds": 3, "valid_groups": 0, "dropped_groups": 4, "gave_up": 1}


def test_groups_that_members_add_count_as_groups_of_the_batch():
    """Four problems, two with a signal, and four groups of predictions about them, which all have one."""
    problems = [make_group(rewards) for rewards in (VALID, RIGHT, VALID, WRONG)]
    round_ = [group for problem in problems for group in (problem, make_group(VALID))]
    policy = Accumulate(threshold=1.0).build(4)
    assert policy.offer(round_) is None
    batch = policy.offer(round_)
    assert len(batch) == 12 and all(map(is_valid, batch))
    assert Accumulate(threshold=0.6).build(4).offer(round_) == round_


def test_pending_groups_survive_a_checkpoint():
    interrupted, uninterrupted = Accumulate().build(3), Accumulate().build(3)
    for policy in (interrupted, uninterrupted):
        assert policy.offer([make_group(VALID, "a"), make_group(WRONG), make_group([0.5])]) is None
    resumed = Accumulate().build(3)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    last = [make_group(VALID, "b"), make_group(RIGHT, "c"), make_group(RIGHT, "d")]
    assert resumed.offer(last) == uninterrupted.offer(last)
    assert resumed.metrics == uninterrupted.metrics


def test_validity_is_decided_in_fp32_as_in_training():
    assert not is_valid(make_group([0.1 + 0.2, 0.3]))
    assert not is_valid(make_group([1.0]))
    assert is_valid(make_group([0.1, 0.2]))


def test_dapo_looks_for_a_signal_in_accuracy_and_not_in_length():
    """All responses are wrong and differ only in a shaper's length penalty, which is not a signal."""
    policy = AlgorithmConfig.model_validate("dapo").batch_policy.build(1)
    wrong, mixed = make_group([0.0, -1.0]), make_group([1.0, -1.0])
    for group, accuracy in ((wrong, [0, 0]), (mixed, [1, 0])):
        for rollout, right in zip(group.rollouts, accuracy, strict=True):
            rollout.rewards = {"math": float(right), "format": 1.0 - right}
    assert policy.offer([wrong]) is None
    assert policy.offer([mixed]) == [mixed]


def test_alpha_of_an_accumulated_batch():
    policy = Accumulate(threshold=0.6).build(5)
    assert policy.offer([make_group(VALID), *[make_group(WRONG)] * 4]) is None
    batch = policy.offer([make_group(VALID), make_group(VALID), *[make_group(RIGHT)] * 3])
    _, metrics = Estimator(age="sample")(TrainBatch.from_groups(batch))
    assert metrics["age_alpha"] == pytest.approx(5 / 3)


def test_a_share_that_reaches_the_threshold_exactly_is_enough():
    """In floating point 0.55 * 100 is above 55."""
    batch = [make_group(VALID)] * 55 + [make_group(WRONG)] * 45
    assert Accumulate(threshold=0.55).build(100).offer(batch) == batch
