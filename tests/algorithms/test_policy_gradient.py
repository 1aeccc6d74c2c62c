"""Policy gradients with and without clipped ratios, GPG's correction and the likelihood, without a model.

test_gradient_invariance.py tests these losses on real ranks.
"""

from __future__ import annotations

import pytest
import torch
from helpers.inputs.rows import make_logp, make_rows, sequence_weights

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.base import token_weights
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.losses.pg import PolicyGradient
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.algorithms.losses.supervised import NLL
from megatron_gvpo.types import BatchTotals


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_grpo_objective(kl_coef):
    """Eq. 3 of arXiv 2402.03300 written out in fp64 with torch.std, one term at a time."""
    rewards = [[1, 0, 0, 1], [0, 1, 0]]
    rows = make_rows(rewards)
    logp_r = make_logp(rows)
    rows = rows.with_columns(advantage_n=Estimator(scale="group_std")(rows)[0])
    weight_r, metrics = token_weights(PPO(kl_coef=kl_coef), rows, logp_r, BatchTotals.of(rows))

    x = logp_r.double().requires_grad_()
    old, ref = rows.old_logp_r.double(), rows.ref_logp_r.double()
    loss, clipped, row = torch.zeros((), dtype=torch.float64), 0, 0
    for group in rewards:
        group = torch.tensor(group, dtype=torch.float64)
        for reward in group:
            advantage = float((reward - group.mean()) / (group.std() + 1e-6))
            tokens = range(rows.offsets[row], rows.offsets[row + 1])
            for t in tokens:
                ratio = (x[t] - old[t]).exp()
                bounded = min(max(float(ratio), 0.8), 1.2)
                outside = bounded != float(ratio) and bounded * advantage < float(ratio) * advantage
                clipped += outside
                surrogate = torch.tensor(bounded * advantage) if outside else ratio * advantage
                kl = (ref[t] - x[t]).exp() - 1 - (ref[t] - x[t])
                loss = loss - (surrogate - kl_coef * kl) / len(tokens) / len(rows)
            row += 1
    assert 0 < clipped < len(x)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(clipped / len(x))
    assert ("kl_ref" in metrics) == (kl_coef > 0)
    torch.testing.assert_close(weight_r.double(), torch.autograd.grad(loss, x)[0], atol=1e-6, rtol=1e-5)


def test_k3_estimate():
    rows = make_rows([[1, 0]], lengths=[1, 1])
    rows = rows.with_columns(ref_logp_r=torch.tensor([0.1, -0.1]), old_logp_r=torch.zeros(2))
    _, metrics = token_weights(PPO(kl_coef=1.0), rows, torch.zeros(2), BatchTotals.of(rows))
    assert metrics["kl_ref"] == pytest.approx((0.005171 + 0.004837) / 2, abs=1e-6)


def test_dr_grpo_first_update_is_the_centred_reward_over_a_constant():
    algorithm = AlgorithmConfig.model_validate("dr_grpo")
    rows = make_rows([[1, 0, 0, 1]])
    logp_r = make_logp(rows)
    rows = rows.with_columns(old_logp_r=logp_r, advantage_n=algorithm.estimator(rows)[0])
    weight_n = sequence_weights(algorithm.loss.sized(max_tokens=300), rows, logp_r)
    assert (weight_n * 4 * 300).tolist() == pytest.approx([-0.5, 0.5, 0.5, -0.5])


def test_nll_weighs_every_token_alike():
    rows = make_rows([[0], [0]], lengths=[1, 3])
    weight_r, metrics = token_weights(NLL(), rows, make_logp(rows), BatchTotals.of(rows))
    assert weight_r.tolist() == pytest.approx([-0.25] * 4)
    assert metrics["loss"] == pytest.approx(-float(make_logp(rows).mean()))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("age", "aggregation"), [("sample", "sequence_mean"), ("token", "token_mean")])
def test_gpg_correction_is_the_mean_over_valid_samples(age, aggregation, ranks, accumulation):
    """Appendix A: however ranks and micro-batches divide the step, its gradient is that of the valid samples.

    Rank 0 of four has no valid group, the others have different numbers of them. The expected value is the
    plain mean over valid samples (or tokens). The paper's identity, alpha times the average of the ranks' own
    means, is also checked where it holds: for means over samples.
    """
    rewards = [[0, 0], [1, 1], [1, 0], [0.5, 0.5], [1, 0], [0, 2], [1, 3], [0, 0]]
    rows = make_rows(rewards)
    advantage_n, metrics = Estimator(age=age)(rows)
    rows = rows.with_columns(advantage_n=advantage_n)
    loss, totals = PolicyGradient(aggregation=aggregation), BatchTotals.of(rows)

    gradient_r = torch.zeros(totals.tokens)
    of_rank = torch.arange(len(rows)).chunk(ranks)
    for indices in of_rank:
        for micro_batch in indices.chunk(accumulation):
            tokens = torch.isin(rows.seq_r, micro_batch)
            weight_r, _ = token_weights(
                loss, rows.select(micro_batch.tolist()), make_logp(rows)[tokens], totals
            )
            gradient_r[tokens] += weight_r

    plain_n = Estimator()(rows)[0]
    valid_n = plain_n != 0
    length_r = rows.length_n[rows.seq_r]
    valid_r = valid_n[rows.seq_r]
    size_r = valid_n.sum() * length_r if age == "sample" else valid_r.sum()
    expected_r = -(plain_n[rows.seq_r] / size_r) * valid_r
    torch.testing.assert_close(gradient_r, expected_r)

    if age == "sample":
        ddp_r = torch.zeros(totals.tokens)
        for indices in of_rank:
            tokens = torch.isin(rows.seq_r, indices)
            ddp_r[tokens] = -plain_n[rows.seq_r][tokens] / (len(indices) * length_r[tokens]) / ranks
        torch.testing.assert_close(metrics["age_alpha"].float() * ddp_r, gradient_r)
