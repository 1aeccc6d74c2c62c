"""Shapers against the worked examples of their papers."""

from __future__ import annotations

import re

import pytest
from helpers.inputs.rows import make_group, rewards_of

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.curriculum.prompts import Equal, Knapsack, SuccessRate, knapsack_value
from megatron_gvpo.algorithms.curriculum.tracker import Counts, PromptHistory, Tracker
from megatron_gvpo.algorithms.custom import CustomShaper
from megatron_gvpo.algorithms.shapers.filters import Drop, Keep, MaskTruncated
from megatron_gvpo.algorithms.shapers.judged import GroupSimilarity, WinRate, unigram_overlap
from megatron_gvpo.algorithms.shapers.length import FormatLength, LengthCurriculum, Overlong, ShortRight
from megatron_gvpo.algorithms.shapers.rewards import Affine, Gate, SerialDecay, SoftLog, Staged, Unlikeliness
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.sampling.shaping import run_shaper, run_shapers
from megatron_gvpo.types import TrainBatch


def shaped(shaper, *groups, step=1):
    before = [rewards_of(group) for group in groups]
    after = shaper(list(groups), step)
    assert [rewards_of(group) for group in groups] == before, "what came in is left as it was"
    return [rewards_of(group) for group in after]


def test_affine_makes_the_two_values_of_w_reinforce():
    assert shaped(Affine(scale=1.1, shift=-1.0), make_group([1, 0])) == [pytest.approx([0.1, -1])]


def test_the_weight_of_overlong_is_what_the_full_punishment_takes_off():
    group = make_group([1] * 3, lengths=[80, 90, 100])
    assert shaped(Overlong(weight=0.5).sized(100), group) == [pytest.approx([1, 0.75, 0.5])]


def test_overlong_falls_linearly_inside_its_buffer():
    group = make_group([1] * 5, lengths=[10, 60, 70, 100, 120])
    expected = [pytest.approx([1, 1, 0.75, 0, 0])]
    assert shaped(Overlong(buffer=40, max_tokens=100), group) == expected
    assert shaped(Overlong(buffer=40).sized(100), group) == expected
    fifth = make_group([1] * 3, lengths=[80, 90, 100])
    assert shaped(Overlong().sized(100), fifth) == [pytest.approx([1, 0.5, 0])], "as 4096 of 20480"


def test_unlikeliness_vector():
    group = make_group([1, 1, 0, 1], logprobs=[-1, -3, -2, -0.5])
    assert shaped(Unlikeliness(), group) == [pytest.approx([0.875, 1, 0, 0.8125])]
    advantage_n, _ = Estimator(scale="group_std", eps=0)(TrainBatch.from_groups(Unlikeliness()([group], 1)))
    assert advantage_n.tolist() == pytest.approx([0.446773, 0.721711, -1.477788, 0.309305], abs=1e-6)


def test_unlikeliness_leaves_alone_what_no_engine_sampled():
    """A given solution was taken for the likeliest response, and lost the most."""
    sampled = make_group([1, 1, 1], lengths=[1, 1, 1], logprobs=[0, -0.5, -2])
    sampled.rollouts[0].logprobs = []
    assert shaped(Unlikeliness(beta=0.5), sampled) == [[1, 0.75, 1]]


def test_short_right_answers_of_the_best_groups():
    """sigmoid(1) = 0.731059; the second group is not in the best half."""
    good, poor = make_group([1, 1, 0], lengths=[10, 20, 5]), make_group([1, 0, 0], lengths=[9, 9, 9])
    expected = [pytest.approx([1 - 0.6 * 0.268941, 1 - 0.6 * 0.731059, 0], abs=1e-5), [1, 0, 0]]
    assert shaped(ShortRight(top=0.5), good, poor) == expected
    assert shaped(ShortRight(top=1.0), make_group([1], lengths=[7])) == [[pytest.approx(0.7)]]
    assert shaped(ShortRight(top=1.0), make_group([0.0, 0.0])) == [[0, 0]]


def test_length_curriculum_vector_and_schedule():
    group = make_group([0] * 4, lengths=[64, 128, 192, 256])
    block = LengthCurriculum(start=128, decay=0.5, every=10, weight=1.0)
    assert shaped(block, group) == [pytest.approx([0.5, 1, 0.5, 0])]
    assert shaped(block, group, step=10) == [pytest.approx([0.5, 1, 0.5, 0])]
    assert shaped(block, group, step=11) == [pytest.approx([1, 0, 0, 0])]


def test_format_length_vector():
    right = make_group([0] * 5, lengths=[0, 25, 50, 75, 100], components={"format": [1] * 5})
    assert shaped(FormatLength(max_tokens=100), right) == [pytest.approx([1, 1.75, 2, 1.5, 0])]
    wrong = make_group([0] * 3, lengths=[0, 50, 100], components={"format": [0] * 3})
    assert shaped(FormatLength(max_tokens=100), wrong) == [pytest.approx([0, 0, -1])]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [0.88, 0.79, 0, 0]), ({"relative": True}, [1, 0.85, 0, 0])],
)
def test_c_grpo_vector(options, expected):
    group = make_group([1, 1, 0, 0], components={"outcome": [1, 1, 0, 0], "rubric": [0.6, 0.3, 0.6, 0]})
    rewards = shaped(Gate(outcome="outcome", bonus="rubric", **options), group)
    assert rewards == [pytest.approx(expected)]


def test_a_thinking_reward_counts_only_behind_the_tests():
    group = make_group([1.5, 0.5], components={"tests": [1, 0], "thinking": [0.8, 0.9]})
    block = Gate(outcome="tests", bonus="thinking", how="add", weight=1.0)
    assert shaped(block, group) == [pytest.approx([2.3, 0.5])]


def test_a_stage_counts_when_the_one_before_it_passed():
    components = {"parse": [1, 1, 0], "tool": [1, 0.2, 1], "right": [1, 1, 1]}
    block = Staged(stages=[("parse", 1.0), ("tool", 0.5), ("right", 1.0)])
    assert shaped(block, make_group([0] * 3, components=components)) == [pytest.approx([3, 1.2, 0])]


def test_soft_log_is_continuous_and_flat_above_its_turn():
    block = SoftLog(tau=0.5)
    (rewards,) = shaped(block, make_group([0.5, 0.5 + 1e-6, 0.5 - 1e-6, 1.0, 0.0]))
    assert rewards[:3] == pytest.approx([0.5] * 3, abs=1e-5)
    assert rewards[3] - 0.5 < 0.5 < 0.5 - rewards[4]
    assert shaped(block, make_group([-1000.0])) > [[-1e9]]


def test_s_grpo_vector():
    assert shaped(SerialDecay(), make_group([0, 1, 1, 0, 1])) == [[0, 1, 0.5, 0, 0.25]]


def test_win_rate_of_a_strict_order():
    group = make_group([0] * 4, lengths=[4, 3, 2, 1])
    judge = "helpers.inputs.rows:longer"
    assert shaped(WinRate(function=judge), group) == [pytest.approx([1, 2 / 3, 1 / 3, 0])]
    assert shaped(WinRate(function=judge), make_group([3.0])) == [[0.5]]
    (capped,) = shaped(WinRate(function=judge, opponents=1), group)
    assert capped == pytest.approx([1, 0.5, 0.5, 0])


def test_similarity_to_the_others_or_to_answers_to_paraphrases():
    overlap = "megatron_gvpo.algorithms.shapers.judged:unigram_overlap"
    assert unigram_overlap("a b", "b c") == 0.5 and unigram_overlap("", "") == 1
    group = make_group([0, 0, 0], texts=["a b", "a b", "c"])
    assert shaped(GroupSimilarity(function=overlap), group) == [pytest.approx([0.5, 0.5, 0])]
    first = make_group([1, 1], texts=["a", "b"], record={"topic": 1})
    second = make_group([0], texts=["a"], record={"topic": 1})
    third = make_group([0], texts=["a"], record={"topic": 2})
    rewards = shaped(GroupSimilarity(function=overlap, across="topic", weight=0.5), first, second, third)
    assert rewards == [pytest.approx([1.5, 0.5]), [pytest.approx(0.5)], [0]]
    nameless = make_group([1], texts=["a"]), make_group([1], texts=["a"])
    assert shaped(GroupSimilarity(function=overlap, across="topic"), *nameless) == [[0], [0]]


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (
            {"name": "win_rate", "function": "helpers.inputs.rows:rewards_of"},
            "called as f(prompt, a, b, **options)",
        ),
        (
            {"name": "group_similarity", "function": "helpers.inputs.rows:rewards_of"},
            "called as f(a, b, **options)",
        ),
        (
            {"name": "win_rate", "function": "megatron_gvpo.api_model:prefers"},
            "missing a required argument: 'url'",
        ),
    ],
)
def test_a_judge_that_cannot_be_called_is_refused_before_loading(block, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        AlgorithmConfig.model_validate({"recipe": "grpo", "shapers": [block]})


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise KeyError('no such tool')", r"KeyError: 'no such tool' \(mine.py, line 2\)"),
        ("return group.rewards[1:]", "2 responses, and it returned 1 rewards"),
        ("return [1.0, float('nan')]", r"expected a list of numbers: nan \(mine.py, line 1\)"),
    ],
)
def test_a_shaper_of_the_users_that_fails_is_named(tmp_path, body, problem):
    (tmp_path / "mine.py").write_text(f"def f(group):\n    {body}\n")
    shaper = CustomShaper(function=f"{tmp_path}/mine.py:f")
    with pytest.raises(RolloutError, match=f"algorithm.shapers: custom: .*{problem}"):
        run_shaper(shaper, [make_group([1, 0])], 1)


def test_shapers_say_what_they_dropped():
    equal, low, good = make_group([1, 1]), make_group([0, 0.5]), make_group([1, 0])
    left, dropped = run_shapers([Drop(), Keep(right=0.9)], [equal, low, good], 1)
    assert left == [make_group([1])]
    assert dropped == {"algorithm.shapers.0 (drop)": 1, "algorithm.shapers.1 (keep)": 1}


def test_rejection_sampling_keeps_the_right_or_the_best():
    groups = make_group([1, 0, 1]), make_group([0, 0])
    assert shaped(Keep(), *groups) == [[1, 1]]
    assert shaped(Keep(which="best"), *groups) == [[1], [0]]


def test_drop_names_what_it_drops():
    groups = make_group([1, 1]), make_group([0, 0]), make_group([1, 0])
    assert shaped(Drop(which="all_right"), *groups) == [[0, 0], [1, 0]]
    assert shaped(Drop(which="all_wrong"), *groups) == [[1, 1], [1, 0]]
    assert shaped(Drop(), *groups) == [[1, 0]]
    by = make_group([1, 0], components={"right": [0, 0]})
    assert shaped(Drop(by="right"), by) == []
    with pytest.raises(ValueError, match=r"no reward component 'rihgt'; there are: right"):
        Drop(by="rihgt")([by], 1)
    with pytest.raises(ValueError, match=r"no reward component 1; there are: right"):
        Drop(by=1)([by], 1)


def test_truncated_responses_are_masked_and_stay_in_their_group():
    group = make_group([0, 1, 0], lengths=[6, 6, 6], reasons=["length", "length", "stop"])
    assert [r.trained for r in MaskTruncated()([group], 1)[0].rollouts] == [False, False, True]
    only_wrong = MaskTruncated(only_wrong=True)([group], 1)[0]
    assert [r.trained for r in only_wrong.rollouts] == [False, True, True]
    repeating = MaskTruncated(only_wrong=True, repeat=3)([group], 1)[0]
    assert [r.trained for r in repeating.rollouts] == [True, True, True], (
        "its last three repeat the three before"
    )
    assert [r.trained for r in MaskTruncated(share=0.0)([group], 1)[0].rollouts] == [True] * 3


def test_knapsack_vectors_and_budget():
    assert knapsack_value(8, 0.5) == pytest.approx(0.124023, abs=1e-6)
    assert knapsack_value(8, 0.1) == pytest.approx(0.046132, abs=1e-6)
    assert knapsack_value(32, 0.1) == pytest.approx(0.078219, abs=1e-6)
    success = [0.5, 0.1, 0.0, 1.0, None]
    shares = Knapsack(low=2).shares(success, 8)
    assert sum(shares) == 40 and shares[4] == 8 and min(shares) >= 2
    assert shares[1] > shares[0] > shares[3] == 2
    assert Equal().shares(success, 8) == [8] * 5


def test_knapsack_gives_nobody_more_than_the_most():
    """Responses that gain nothing go to the prompt that never succeeded, up to the limit, then to the
    others.
    """
    shares = Knapsack(low=2, high=12).shares([1.0, 1.0, 1.0, 0.0], 8)
    assert shares == [7, 7, 6, 12]
    assert Knapsack(low=2, high=5).shares([1.0, 0.5], 8) == [5, 5], "more than all may have is not sampled"
    with pytest.raises(ValueError, match="low=8 exceeds high=4"):
        Knapsack(low=8, high=4)


def test_knapsack_is_optimal_where_all_can_be_tried():
    success, n = [0.3, 0.7, 0.05], 4
    shares = Knapsack(low=1, high=12).shares(success, n)
    worth = {
        (a, b, 12 - a - b): sum(map(knapsack_value, (a, b, 12 - a - b), success))
        for a in range(1, 11)
        for b in range(1, 12 - a)
    }
    assert sum(map(knapsack_value, shares, success)) == pytest.approx(max(worth.values()))


def test_spo_is_unsure_of_what_it_saw_once():
    """One right response is not certainty: v is the tracker's estimate, and the prompt is drawn again."""
    rule = Tracker(weight=8)
    counts = rule.updated(rule.start, [1.0])
    v, weight = rule.posterior(counts), sum(counts)
    sampling_weight = SuccessRate(favour="unsure", floor=0.0).weight(PromptHistory(1.0, v, weight))
    assert sampling_weight == pytest.approx((4.6 / 8.2 * 3.6 / 8.2 / 8.2) ** 0.5)


def test_a_tracker_forgets_what_was_imagined():
    rule = Tracker(decay=0.9, weight=8, expected=0.5)
    counts = rule.start
    for _ in range(100):
        counts = rule.updated(counts, [1.0])
    assert rule.posterior(counts) > 0.999 and sum(counts) == pytest.approx(10, abs=0.01)


def test_success_rates_weigh_prompts_as_gpgs_code_does():
    known = [PromptHistory(p, p, 4.0) for p in (0.0, 0.25, 1.0)]

    def weights(favour):
        block = SuccessRate(favour=favour, floor=0.0)
        return [block.weight(record) for record in known]

    assert weights("hard") == [1, 0.75, 0]
    assert weights("soft") == [0, 0.75, 0]
    assert weights("medium") == [0, 1, 0]
    assert weights("unsure") == pytest.approx([0, (0.1875**0.5) / 2, 0])
    assert SuccessRate(floor=0.0).weight(None) == 1


def test_spo_tracker_vector():
    """alpha and beta start at 4 and decay by half the square root of 2, which gives v = 0.575111."""
    rule = Tracker(decay=2**-0.5, weight=8, expected=0.5)
    counts = rule.updated(rule.start, [1.0])
    assert rule.posterior(counts) == pytest.approx(0.575111, abs=1e-6)
    assert sum(counts) == pytest.approx(3.828427 + 2.828427)
    assert Tracker(low=-1, high=1).updated(Counts(0, 0, 0), [-1, 1, 0]) == (1.5, 1.5, 0)
    assert Tracker(low=-1, high=1).reward(0.25) == -0.5
