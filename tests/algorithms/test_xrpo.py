"""XRPO's exploration: rounds of more responses, and solved problems in front of unsolved ones."""

from __future__ import annotations

import json
import math
from statistics import stdev

import pytest
from helpers.inputs.rows import make_group, rewards_of
from scipy import stats
from test_members import Engine

from megatron_gvpo.algorithms.members.exemplars import Exemplars, alike
from megatron_gvpo.algorithms.members.more_responses import Rounds, half_width, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 15, 126, 127])
@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.5])
def test_students_quantile_is_scipys(freedom, alpha):
    assert student_quantile(freedom, alpha) == pytest.approx(stats.t.ppf(1 - alpha / 2, freedom), rel=1e-9)


def test_a_round_goes_where_it_narrows_the_mean_most():
    """Scipy's quantiles give the expected order, for equal, alternating, rare and single rewards."""
    rewards = [[0] * 4, [1, 0, 1, 0], [0] * 7 + [1], [1], [0, 1]]
    explore, total = 0.2, sum(map(len, rewards))

    def width(n: int, known: list[int]) -> float:
        return stats.t.ppf(0.975, n - 1) * stdev(known) / math.sqrt(n)

    counts = [len(known) for known in rewards]
    for _ in range(20):
        priorities = [
            math.inf
            if n < 2
            else (width(n, known) - width(n + 1, known) if len(known) > 1 else 0)
            + explore * math.sqrt(math.log(1 + total) / n)
            for n, known in zip(counts, rewards, strict=True)
        ]
        counts[priorities.index(max(priorities))] += 1
    expected = [n - len(known) for n, known in zip(counts, rewards, strict=True)]
    assert Rounds(explore=explore).shares(rewards, 20) == expected
    assert sum(expected) == 20 and expected[1] > expected[2] and expected[3] > 0


def test_without_a_bonus_only_what_is_unsure_is_explored():
    assert Rounds(explore=0).shares([[1] * 4, [1, 0, 0, 0], [0] * 4], 9) == [0, 9, 0]
    assert Rounds(explore=1e6).shares([[1, 0], [0] * 4, [1] * 6], 6) == [4, 2, 0], "the fewest first"
    assert half_width(4, 0.5, 0.05) == pytest.approx(3.182446 * 0.25, abs=1e-6)


def test_rounds_look_at_what_the_one_before_found():
    """The strong prompt's answers are all right, the weak one's all wrong; a prompt is left once its mean is
    certain.
    """
    strong, weak = make_group([1, 0], "strong"), make_group([0, 0], "weak")
    sampling = Engine()
    grown, unchanged = Rounds(rounds=2, extra=2, explore=0)([strong, weak], sampling)
    assert sampling.prompts == ["strong"] * 8 and rewards_of(grown) == [1, 0] + [1] * 8 and unchanged == weak
    assert all(rollout.source == "policy" for rollout in grown.rollouts)


def solved(name: str, problem: str, reward: float = 1.0):
    return make_group([0, reward], name, texts=["no", f"so {name}"], record={"prompt": problem})


TEMPLATE = "[{problem}={solution}]"


def test_unsolved_problems_are_asked_behind_the_solved_ones_like_them():
    corpus = Exemplars(count=2, n=3, template=TEMPLATE).build()
    known = [solved("a", "two strong plus {solution}"), solved("b", "two plus"), solved("c", "one minus two")]
    failed = make_group([0, 0], "p", record={"prompt": "two plus two"})
    *others, seeded = corpus([*known, failed], sampling := Engine())
    assert others == known
    assert sampling.prompts == ["[two strong plus {solution}=so a][two plus=so b]p"], "the likest comes last"
    assert rewards_of(seeded) == [0, 0, 1, 1, 1] and seeded.prompt == failed.prompt
    assert [rollout.weight_version for rollout in seeded.rollouts] == [0, 0, -1, -1, -1]


def test_a_problem_is_no_exemplar_of_itself_and_the_oldest_is_forgotten():
    corpus = Exemplars(count=2, n=1, keep=2, template=TEMPLATE).build()
    corpus([solved("a", "x"), solved("b", "x"), solved("c", "x")], Engine())
    failed = solved("c", "x", reward=0)
    resumed = Exemplars(count=5, n=1, template=TEMPLATE).build()
    resumed.load_state_dict(json.loads(json.dumps(corpus.state_dict())))
    for exemplars in (corpus, resumed):
        exemplars([failed], sampling := Engine())
        assert sampling.prompts == ["[x=so b]c"]
    assert Exemplars().build()([failed], Engine()) == [failed], "nobody has solved anything yet"


def test_as_many_exemplars_as_fit():
    class Short(Engine):
        def extended(self, prompt, text, *, before=False):
            return super().extended(prompt, text, before=before) if len(text) < 9 else None

    corpus = Exemplars(n=1, template=TEMPLATE).build()
    failed = make_group([0], "p", record={"prompt": "y"})
    corpus([solved("a", "x"), solved("b", "y"), failed], sampling := Short())
    assert sampling.prompts == ["[y=so b]p"]
    longer = Exemplars(n=1, template=TEMPLATE + "!!").build()
    assert longer([solved("a", "x"), failed], Short())[1] == failed


def test_likeness_is_of_words():
    assert alike("a b", "b c") == pytest.approx(1 / 3) and alike("", "") == 0 and alike("a a", "a") == 1
    with pytest.raises(ValueError, match=r"needs \{problem\}"):
        Exemplars(template="{solution}")
