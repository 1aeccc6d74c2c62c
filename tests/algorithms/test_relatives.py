"""The losses of GRPO's relatives against their papers' formulas. test_losses.py tests what all losses
share.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers.inputs.rows import make_logp, make_rows, sequence_weights

from megatron_gvpo.algorithms.base import token_weights
from megatron_gvpo.algorithms.losses.disco import DisCO
from megatron_gvpo.algorithms.losses.dpo import DPO
from megatron_gvpo.algorithms.losses.pg import CISPO
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.algorithms.losses.reg_grpo import RegGRPO
from megatron_gvpo.types import BatchTotals, TrainBatch


def one_response(log_ratios: list[float], advantage: float = 1.0) -> tuple[TrainBatch, torch.Tensor]:
    rows = make_rows([[0]], lengths=[len(log_ratios)])
    old_r = torch.full((len(log_ratios),), -1.0)
    rows = rows.with_columns(old_logp_r=old_r, advantage_n=torch.tensor([advantage]))
    return rows, old_r + torch.tensor(log_ratios)


def test_gspo_ratio():
    rows, logp_r = one_response([0.1, -0.2, 0.3])
    _, metrics = token_weights(PPO(ratio="sequence", clip_high=1.0), rows, logp_r, BatchTotals.of(rows))
    assert float(metrics["loss"]) == pytest.approx(-1.068939, abs=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gspo_clips_whole_sequences(advantage):
    rows, logp_r = one_response([0.1, -0.2, 0.3], advantage)
    gspo = PPO(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    weight_r, metrics = token_weights(gspo, rows, logp_r, BatchTotals.of(rows))
    if advantage > 0:
        assert weight_r.abs().max() == 0 and float(metrics["loss"]) == pytest.approx(-1.0004, abs=1e-6)
    else:
        torch.testing.assert_close(weight_r, torch.full((3,), 1.068939 / 3))


def test_cispo_keeps_the_gradient_that_ppo_clips_away():
    rows, logp_r = one_response([0.5, 0.0])
    clipped, _ = token_weights(PPO(aggregation="token_mean"), rows, logp_r, BatchTotals.of(rows))
    weight_r, metrics = token_weights(CISPO(clip_high=0.2), rows, logp_r, BatchTotals.of(rows))
    assert clipped.tolist() == pytest.approx([0, -0.5])
    assert weight_r.tolist() == pytest.approx([-0.6, -0.5])
    assert metrics["clip_fraction"] == 0.5


def test_dpo_is_the_logistic_loss_of_its_pair():
    rows = make_rows([[1, 0.2, 0], [0.5, 0.5]])
    logp_r = make_logp(rows)
    drift = rows.sequence_sum(logp_r - rows.ref_logp_r).double()
    margin = 0.1 * float(drift[0] - drift[2])
    weight_n = sequence_weights(DPO(), rows, logp_r)
    pull = 0.1 / (1 + math.exp(margin)) / 2  # two groups, one of them without a pair
    assert weight_n.tolist() == pytest.approx([-pull, 0, pull, 0, 0], abs=1e-7)
    _, metrics = token_weights(DPO(), rows, logp_r, BatchTotals.of(rows))
    assert float(metrics["loss"]) == pytest.approx(math.log1p(math.exp(-margin)) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("rewards", "pairs"),
    [
        ([1, 0, 1, 0], [(0, 1), (0, 3), (2, 1), (2, 3)]),
        ([0.5, 1, 0, 1, 0.5], [(1, 2), (3, 2)]),
    ],
)
def test_dpo_of_ties_is_the_mean_over_best_and_worst(rewards, pairs):
    rows = make_rows([rewards], lengths=[5, 3, 1, 2, 4][: len(rewards)])
    drift = rows.sequence_sum(make_logp(rows) - rows.ref_logp_r).double().tolist()
    _, metrics = token_weights(DPO(), rows, make_logp(rows), BatchTotals.of(rows))
    losses = [math.log1p(math.exp(-0.1 * (drift[i] - drift[j]))) for i, j in pairs]
    assert float(metrics["loss"]) == pytest.approx(sum(losses) / len(pairs), rel=1e-5)


def test_dpo_of_all_pairs_is_their_mean():
    rows = make_rows([[1, 0.2, 0]])
    drift = rows.sequence_sum(make_logp(rows) - rows.ref_logp_r).double().tolist()
    _, metrics = token_weights(DPO(pairs="all"), rows, make_logp(rows), BatchTotals.of(rows))
    losses = [math.log1p(math.exp(-0.1 * (drift[i] - drift[j]))) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert float(metrics["loss"]) == pytest.approx(sum(losses) / 3, rel=1e-5)


def scored(scores: list[float], rewards: list[float], lengths: list[int]) -> tuple[TrainBatch, torch.Tensor]:
    """Rows whose mean log-prob per token is `scores`, under the old policy as well."""
    rows = make_rows([rewards], lengths=lengths)
    logp_r = torch.tensor(scores)[rows.seq_r]
    return rows.with_columns(old_logp_r=logp_r), logp_r


@pytest.mark.parametrize(
    ("tau", "gap", "negative"),
    [(None, 0.1, [0.5, 0.5]), (10.0, 0.0995, [0.505, 0.495]), (1.0, None, [0.549834, 0.450166])],
)
def test_disco_vector(tau, gap, negative):
    rows, logp_r = scored([-0.2, -0.3, -0.5, -0.4], [1, 0, 0, 1], [1, 2, 3, 4])
    weight_r, metrics = token_weights(DisCO(tau=tau), rows, logp_r, BatchTotals.of(rows))
    if gap is not None:
        assert float(metrics["gap"]) == pytest.approx(gap, abs=1e-6)
    # J's s_1 and s_2 are the wrong answers' -0.3 and -0.5: the softmax prefers the first.
    weight_n = rows.sequence_sum(weight_r)
    assert weight_n.tolist() == pytest.approx([-0.5, negative[0], negative[1], -0.5], abs=1e-5)


def test_disco_counts_groups_without_contrast_in_its_mean():
    rows = make_rows([[1, 0], [1, 1], [0]])
    logp_r = make_logp(rows)
    rows = rows.with_columns(old_logp_r=logp_r)
    weight_r, _ = token_weights(DisCO(tau=None), rows, logp_r, BatchTotals.of(rows))
    assert rows.sequence_sum(weight_r).tolist() == pytest.approx([-1 / 3, 1 / 3, 0, 0, 0])


def test_drpo_vector():
    rows, logp_r = scored([-0.2, -0.3, -0.4], [1, 1, 0], [1000, 4000, 10])
    drpo = DisCO(length_temperature=0.1).sized(8192)
    weight_r, _ = token_weights(drpo, rows, logp_r, BatchTotals.of(rows))
    assert rows.sequence_sum(weight_r).tolist() == pytest.approx([-0.974965, -0.025035, 1], abs=1e-5)


def test_reg_grpo_vector():
    rows = make_rows([[1, 0, 0, 1]], lengths=[1] * 4)
    advantage = torch.tensor([0.866025, -0.866025, -0.866025, 0.866025])
    rows = rows.with_columns(old_logp_r=torch.tensor([-10.5, -11.5, -11.0, -9.5]), advantage_n=advantage)
    logp_r = torch.tensor([-10.0, -12.0, -11.0, -9.0])
    weight_r, metrics = token_weights(RegGRPO(eps=1e-9), rows, logp_r, BatchTotals.of(rows))
    assert float(metrics["loss"]) == pytest.approx(0.572796, abs=1e-5)
    z = torch.tensor([0.783349, -1.305582, -0.261116, 0.783349])
    g = -2 * (advantage - z)
    sigma = torch.tensor([0.5, -0.5, 0.0, 0.5]).std()
    torch.testing.assert_close(weight_r, (g - g.mean() - z * (g * z).sum() / 3) / sigma, atol=1e-4, rtol=1e-4)


def test_reg_grpo_is_regular_at_the_old_policy():
    rows = make_rows([[1, 0, 0]], lengths=[1, 1, 1])
    logp_r = rows.old_logp_r.clone()
    rows = rows.with_columns(advantage_n=torch.tensor([1.0, -0.5, -0.5]))
    weight_r, _ = token_weights(RegGRPO(eps=0.1), rows, logp_r, BatchTotals.of(rows))
    torch.testing.assert_close(weight_r, -2 * rows.advantage_n / 0.1)


@pytest.mark.parametrize(("how", "ratio"), [("probability", math.exp(-2)), ("shaped", None)])
def test_demonstrations_have_no_old_policy(how, ratio):
    rows = make_rows([[0]], lengths=[1])
    rows = rows.with_columns(
        advantage_n=torch.tensor([1.0]),
        old_logp_r=torch.tensor([-9.0]),
        demonstration_n=torch.tensor([True]),
    )
    loss = PPO(demonstrations=how, shape=0.1)
    _, metrics = token_weights(loss, rows, torch.tensor([-2.0]), BatchTotals.of(rows))
    probability = math.exp(-2)
    expected = probability if how == "probability" else probability / (probability + 0.1)
    assert float(metrics["loss"]) == pytest.approx(-expected)


def test_expo_adds_the_likelihood_of_what_was_given():
    rows = make_rows([[0, 0]], lengths=[1, 3])
    demonstration_n = torch.tensor([False, True])
    rows = rows.with_columns(demonstration_n=demonstration_n, advantage_n=torch.ones(2))
    logp_r = rows.old_logp_r.clone()
    loss = PPO(demonstrations="likelihood", likelihood_coef=0.2)
    weight_r, _ = token_weights(loss, rows, logp_r, BatchTotals.of(rows))
    assert weight_r.tolist() == pytest.approx([-1 / 2, *[-0.2 / 3 / 2] * 3])


def test_a_hinted_response_is_weighed_against_the_policy_with_the_hint():
    rows = make_rows([[0, 0]], lengths=[1, 1])
    rows = rows.with_columns(
        advantage_n=torch.ones(2),
        old_logp_r=torch.tensor([-1.0, -1.0]),
        engine_logp_r=torch.tensor([-1.1, -1.1]),
        version_r=torch.tensor([0, -1]),
    )
    _, metrics = token_weights(
        PPO(cross_context=True), rows, torch.tensor([-1.0, -1.0]), BatchTotals.of(rows)
    )
    assert float(metrics["loss"]) == pytest.approx(-(1 + math.exp(0.1)) / 2)
    corrected = PPO(cross_context=True, importance={"name": "truncate"})
    _, metrics = token_weights(corrected, rows, torch.tensor([-1.0, -1.0]), BatchTotals.of(rows))
    both = pytest.approx(-2 * math.exp(0.1) / 2)  # the hinted one's ratio is corrected already
    assert float(metrics["loss"]) == both
