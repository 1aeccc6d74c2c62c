"""Evaluation metrics against enumeration and hand-made groups."""

from itertools import combinations
from math import comb

import pytest

from megatron_gvpo.data.final_answer import final_answer
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe.rollout_metrics import (
    all_at_k,
    is_correct,
    maj_at_n,
    pass_at_k,
    score,
    summarise,
)
from megatron_gvpo.settings.rewards import RewardConfig


def rollout(text: str, value: float, tokens: int = 2, finish: str = "stop") -> Rollout:
    rewards = {"math": value, "format": 1.0}
    return Rollout([5] * tokens, [0.0] * tokens, text, finish, rewards=rewards, reward=value + 0.1)


def group(*rollouts: Rollout) -> Group:
    return Group(Prompt("p", (1,), ""), list(rollouts))


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_and_all_at_k_are_means_over_all_subsets(n):
    for c in range(n + 1):
        correct = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(correct, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
            assert all_at_k(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_stable_for_many_samples():
    n, c, k = 10_000, 3, 100
    exact = (comb(n, k) - comb(n - c, k)) / comb(n, k)  # big integers
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_it_cannot_estimate(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k} of n={n} samples with c={c}"):
        pass_at_k(n, c, k)
    with pytest.raises(ValueError, match=f"all@{k} of n={n} samples with c={c}"):
        all_at_k(n, c, k)


def test_majority_vote():
    assert maj_at_n(["7", "8", "8"], [False, True, True])
    assert not maj_at_n(["7", "8", "7", "8", "9"], [False, True, False, True, True]), "ties: first occurrence"
    assert maj_at_n(["8", "7", "7", "8"], [True, False, False, True])


def test_final_answer():
    assert final_answer(r"so \boxed{1}, no: \boxed{ \frac{1}{2} }.") == r"\frac{1}{2}"
    assert final_answer(" 42\n") == "42"
    assert final_answer(r"cut off \boxed{12") == r"cut off \boxed{12"
    assert final_answer(r"\boxed{}") == ""
    assert final_answer(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"


def test_the_majority_is_of_answers_where_the_reward_reads_them():
    """Without the marker each text was an answer of its own, and maj@n was pass@1 of the first sample."""
    texts = [("I guess.\n#### 6", 0.0), ("1 + 6 = 7\n#### 7", 1.0), ("6 + 1 = 7\n#### 7", 1.0)]
    answered = [group(*(rollout(text, value) for text, value in texts))]
    marker = RewardConfig(name="math", options={"marker": "####"})
    assert summarise(answered, [], judge=marker)["eval/maj@n"] == 1
    assert (
        final_answer(
            "Answer: **7.** So:\nanswer:\n$8$", RewardConfig(name="math", options={"marker": "Answer:"})
        )
        == "8"
    )
    generated = RewardConfig(name="reasoning_gym")
    assert final_answer("<answer>6</answer>, no: <answer>\n7 </answer>.", generated) == "7"
    own = RewardConfig(name="mine", function="r.py:f", options={"marker": "####"})
    assert final_answer(r"#### 6 and \boxed{7}", own) == "7"


def is_right(rollout: Rollout) -> bool:
    return is_correct(score(rollout), 1.0)


def test_correct_is_the_first_component_at_its_full_value():
    assert is_right(rollout("x", 1.0))
    assert is_right(rollout("x", 1 - 1e-7))
    assert not is_right(rollout("x", 0.99)), "although the total reward exceeds 1"
    assert is_right(Rollout([1], [0.0], "", "stop", reward=1.0)), "no components: the reward"


@pytest.mark.parametrize(("right_at", "rights"), [(1.0, 1), (0.5, 3), (0.75, 2), (10.0, 0), (-1.0, 4)])
def test_what_is_right_is_a_setting(right_at: float, rights: int):
    scored = [rollout(r"\boxed{7}", score) for score in (1.0, 0.5, 0.75, 0.0)]
    metrics = summarise([group(*scored)], k=[2], right_at=right_at)
    assert metrics["eval/pass@1"] == rights / 4 and metrics["eval/avg@n"] == 2.25 / 4
    assert metrics["eval/maj@n"] == (right_at <= 1) and metrics["eval/all@2"] == comb(rights, 2) / comb(4, 2)


def test_summary_of_unequal_groups():
    groups = [
        group(rollout(r"\boxed{3}", 1.0, tokens=4), rollout(r"= \boxed{3}", 1.0, tokens=8)),
        group(
            rollout(r"\boxed{5}", 0.5, tokens=1),
            rollout(r"\boxed{6}", 1.0, tokens=2),
            rollout("no end", 0.0, tokens=6, finish="length"),
            rollout(r"\boxed{5}", 0.5, tokens=3),
        ),
    ]
    groups[0].rollouts[1].reward_errors = {"length": "it returned None"}
    assert summarise(groups, k=[2]) == pytest.approx(
        {
            "eval/pass@1": (1 + 1 / 4) / 2,
            "eval/pass@2": (1 + 1 / 2) / 2,  # 3 of the 6 pairs of the second group hold the correct one
            "eval/all@2": (1 + 0) / 2,
            "eval/avg@n": (1 + 2 / 4) / 2,
            "eval/maj@n": (1 + 0) / 2,
            "eval/response_length": (6 + 3) / 2,
            "eval/truncated": (0 + 1 / 4) / 2,
            "eval/errors": (1 / 2 + 0) / 2,
        }
    )


def test_summary_needs_groups_and_enough_samples():
    with pytest.raises(ValueError, match="no groups"):
        summarise([], k=[1])
    with pytest.raises(ValueError, match="pass@4 of n=1"):
        summarise([group(rollout("1", 1.0))], k=[1, 4])
