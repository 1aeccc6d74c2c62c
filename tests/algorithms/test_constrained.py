"""FGRPO, GRPO-CARE, information consistency, GroupRank's rewards and priors, against their formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.inputs.rows import make_group, make_logp, make_rows, rewards_of
from test_members import Engine

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.advantages.likelihood import ConfidenceEstimator
from megatron_gvpo.algorithms.advantages.normalised import LagrangianEstimator
from megatron_gvpo.algorithms.base import token_weights
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.curriculum.tracker import FunctionPrior
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.algorithms.members.more_responses import OneMore, expected_drop
from megatron_gvpo.algorithms.shapers.rewards import InformationConsistency
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.rewards.ranking import alignment, listed, ndcg
from megatron_gvpo.types import BatchTotals


def constrained(values: list[list[float]]):
    flat = torch.tensor([float(v) for group in values for v in group])
    return make_rows([[1, 0, 0, 1], [0, 1, 0, 0]]).with_columns(component_n={"format": flat})


def test_fgrpo_multipliers_rise_by_the_rate_times_what_is_missing():
    """Values of the catalogue: mean c = 0.5, tau = 0.9, rate 0.01 raise the multiplier by 0.004 a step."""
    block = LagrangianEstimator(constraints={"format": 0.9})
    running = block.build()
    rows = constrained([[1, 1, 0, 0], [0, 1, 0, 1]])
    grpo_n = Estimator(scale="group_std")(rows)[0]
    torch.testing.assert_close(running.fill(rows)[0].advantage_n, grpo_n)
    assert running.values["format"] == pytest.approx(0.004)
    filled, metrics = running.fill(rows)
    of_format = Estimator(scale="group_std")(rows.with_columns(reward_n=rows.component_n["format"]))[0]
    torch.testing.assert_close(filled.advantage_n, grpo_n + 0.004 * of_format)
    assert metrics["lambda_format"] == pytest.approx(0.004)
    assert running.values["format"] == pytest.approx(0.008)

    later = block.build()
    later.load_state_dict(running.state_dict())
    assert later.values == running.values
    satisfied = constrained([[1, 1, 1, 1], [1, 1, 1, 1]])
    for _ in range(20):
        later.fill(satisfied)
    assert later.values["format"] == 0.0, "a constraint that holds weighs nothing"
    assert block.moved(rows, {"format": 4.999})["format"] == 5.0
    with pytest.raises(ValueError, match="no reward component 'safety'; there are: format"):
        LagrangianEstimator(constraints={"safety": 1.0})(rows)


def test_care_bonus_goes_to_right_answers_that_follow():
    """Answer probabilities are 0.9, 0.5, 0.95 (capped) and 0.99 (wrong): the mean is 0.7833 and the slack
    0.01.
    """
    rows = make_rows([[1, 1, 1, 0]], lengths=[3, 3, 3, 3])
    likely = [0.9, 0.5, 0.999, 0.99]
    ref_r = torch.tensor([[-9.0, math.log(p), math.log(p)] for p in likely]).flatten()
    rows = rows.with_columns(ref_logp_r=ref_r, truncated_n=torch.ones(4, dtype=torch.bool))
    rows.response_ids = [(8, 2, 2)] * 4
    block = ConfidenceEstimator(marker_ids=(8,))
    assert block.confidence(rows).tolist() == pytest.approx([0.9, 0.5, 0.95, 0.95], abs=1e-6)
    assert block.bonus(rows).tolist() == [0.5, 0.0, 0.5, 0.0]
    shaped = rows.with_columns(reward_n=torch.tensor([1.5, 1.0, 1.5, 0.0]))
    torch.testing.assert_close(block(rows)[0], Estimator(scale="group_std")(shaped)[0])
    without_marker = ConfidenceEstimator()  # no marker: the whole response
    assert without_marker.confidence(rows)[1] == pytest.approx(math.exp((-9 + 2 * math.log(0.5)) / 3))


def test_care_asks_how_likely_the_answer_is_and_not_what_closes_it():
    """Token 8 opens an answer, 9 closes it, 0 ends the response; the last response is cut off."""
    rows = make_rows([[1, 1, 1, 1]], lengths=[4, 3, 4, 2])
    sure, half = math.log(0.99), math.log(0.5)
    ref_r = torch.tensor([-9, half, sure, sure, -9, half, sure, half, half, -9, half, -9, half])
    truncated_n = torch.tensor([False, False, False, True])
    rows = rows.with_columns(ref_logp_r=ref_r, truncated_n=truncated_n)
    rows.response_ids = [(8, 2, 9, 0), (8, 2, 0), (2, 2, 8, 0), (8, 2)]
    confidence_n = ConfidenceEstimator(marker_ids=(8,), close_ids=(9,)).confidence(rows)
    assert confidence_n.tolist() == pytest.approx([0.5, 0.5, 0.95, 0.5]), "an empty answer is certain, capped"


def test_care_needs_accuracy_not_below_the_groups_mean():
    rows = make_rows([[1, 0.2, 1]], lengths=[1, 1, 1]).with_columns(ref_logp_r=torch.zeros(3))
    assert ConfidenceEstimator().bonus(rows).tolist() == [0.5, 0.0, 0.5]
    config = AlgorithmConfig.model_validate("grpo_care")
    assert [reference.name for reference in config.reference_policies] == ["step_start", "ema"]


def test_paraphrases_should_carry_as_much_information():
    """The first question has surprisals 1, 2 and 3 (mean 2), the other one 9."""
    a = make_group([1, 0], "a", logprobs=[-1.0, -2.0], record={"topic": 1})
    b = make_group([1], "b", logprobs=[-3.0], record={"topic": 1})
    alone = make_group([1], "c", logprobs=[-9.0])
    shaped = InformationConsistency(across="topic", coef=0.5)([a, b, alone], 1)
    assert [rewards_of(group) for group in shaped] == [[0.5, 0.0], [0.5], [1.0]]
    unknown = make_group([1], "d", record={"topic": 1})
    unknown.rollouts[0].logprobs = []
    assert rewards_of(InformationConsistency(across="topic")([unknown], 1)[0]) == [1.0]


def test_rankings_are_judged_by_ndcg_alignment_and_format():
    """The relevances are 3, 0 and 1, so the ideal order is 1, 3, 2."""
    prompt = Prompt("p", (1,), "p", record={"relevance": [3, 0, 1]})

    def response(text: str) -> Rollout:
        return Rollout([1], [], text, "stop")

    ideal = 7 + 1 / math.log2(3)
    assert ndcg(prompt, response("[1]: 0.9 [3]: 0.5 [2]: 0.1")) == pytest.approx(1)
    assert ndcg(prompt, response("[2]: 0.9\n[1]: 0.5")) == pytest.approx((7 / math.log2(3) + 1 / 2) / ideal)
    assert ndcg(prompt, response("[2]: 0.9 [1]: 0.5 [3]: 0.1"), k=1) == 0
    assert alignment(prompt, response("[1]: 1.0 [2]: 0 [3]: 0.333333")) == pytest.approx(1, abs=1e-5)
    assert alignment(prompt, response("[1]: 0.4 [2]: 0.5")) == pytest.approx(1 - (0.6 + 0.5 + 1) / 3)
    assert listed(prompt, response("[1]: 1 [2]: 0 [3]: 0.1")) == 1
    assert listed(prompt, response("[1]: 1 [1]: 0 [3]: 0.1")) == listed(prompt, response("none")) == 0
    with pytest.raises(ValueError, match="'relevance' is not a list"):
        ndcg(Prompt("q", (1,), "q"), response("[1]: 1"))


def guess(prompt: Prompt, scale: float = 1.0) -> float:
    return scale * len(prompt.text)


def test_a_prior_may_be_a_function_of_the_users():
    algorithm = AlgorithmConfig.model_validate(
        {"recipe": "v05", "prior": {"name": "function", "function": "test_constrained:guess"}}
    )
    assert algorithm.prior.expected(Prompt("p", (1,), "four")) == 4.0
    with pytest.raises(ValueError, match="size"):
        FunctionPrior(function="test_constrained:guess", options={"size": 1})


def test_v05_draws_one_more_while_it_is_worth_it():
    """With prior 0.5 (0 of -1..1): all right gives D = 1 - 1/k; half right tells nothing apart, and 4
    suffice.
    """
    assert expected_drop(1.0, 4) == pytest.approx(0.75 / 4 - 0.75 / 4.75)
    assert expected_drop(0.2, 4) == 0
    right, even = (
        replace(make_group(r, name), prior=0.5) for name, r in (("strong", [1] * 4), ("q", [1, 0]))
    )
    even = replace(even, rollouts=even.rollouts * 2)
    grown, unchanged = OneMore()([right, even], sampling := Engine())
    k = next(k for k in range(4, 17) if k == 16 or expected_drop(1.0, k) <= 0.0039)
    assert len(grown.rollouts) == k == 15 and unchanged == even
    assert sampling.prompts == ["strong"] * (k - 4)
    assert len(OneMore(high=6)([right], Engine())[0].rollouts) == 6
    with pytest.raises(ValueError, match=r"set algorithm\.prior"):
        OneMore()([make_group([1])], Engine())


def test_v05s_prior_is_on_the_scale_of_its_rewards():
    """Rewards 0 and 1 become -1 and 1, and the tracker's expectation is scaled in the same way."""
    algorithm = AlgorithmConfig.model_validate("v05")
    (group,) = algorithm.shapers[0]([replace(make_group([1, 0]), prior=0.75)], 1)
    assert rewards_of(group) == [1, -1] and group.prior == 0.5
    assert algorithm.shapers[0]([make_group([1])], 1)[0].prior is None


def test_a_golden_answer_may_be_free_of_clipping():
    """GCPO leaves it open: the ratio of a given solution is clipped like any other, or never."""
    rows = make_rows([[1, 0]], lengths=[1, 1]).with_columns(
        advantage_n=torch.tensor([1.0, 1.0]),
        demonstration_n=torch.tensor([True, False]),
        old_logp_r=torch.zeros(2),
    )
    far_r = torch.full((2,), math.log(2.0))
    clipped, _ = token_weights(PPO(), rows, far_r, BatchTotals.of(rows))
    free, _ = token_weights(PPO(demonstrations="unclipped"), rows, far_r, BatchTotals.of(rows))
    assert clipped.tolist() == [0.0, 0.0] and free.tolist() == [pytest.approx(-1.0), 0.0]
    # Nor does the second bound, of negative advantages, take its gradient.
    worse = rows.with_columns(advantage_n=torch.tensor([-1.0, -1.0]))
    bounded = PPO(demonstrations="unclipped", dual_clip=1.5)
    weights_r, _ = token_weights(bounded, worse, far_r, BatchTotals.of(worse))
    assert weights_r.tolist() == [pytest.approx(1.0), 0.0]
    near_r = make_logp(rows) * 0
    losses = [PPO(demonstrations=how) for how in ("ratio", "unclipped")]
    torch.testing.assert_close(
        *(token_weights(loss, rows, near_r, BatchTotals.of(rows))[0] for loss in losses)
    )
