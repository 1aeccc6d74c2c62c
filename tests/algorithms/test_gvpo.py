"""GVPO's forms, norms and ablations against the paper's formulas, without a model.

test_gvpo_theorem.py tests the minimiser of the loss, test_gradient_invariance.py the loss on real ranks.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.inputs.rows import make_logp, make_rows, sequence_weights

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.base import token_weights
from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.types import BatchTotals, TrainBatch


def gvpo_vector() -> tuple[TrainBatch, torch.Tensor]:
    """R, l and l' of the worked example, in which each sequence has one token."""
    rows = make_rows([[1, 0, 0, 1]], lengths=[1] * 4)
    rows = rows.with_columns(ref_logp_r=torch.tensor([-10.5, -11.5, -11.0, -9.5]))
    return rows, torch.tensor([-10.0, -12.0, -11.0, -9.0])


@pytest.mark.parametrize(("norm", "divisor"), [("k-1", 3), ("sum", 1), ("k", 4)])
@pytest.mark.parametrize("form", ["mse", "variance", "nll"])
def test_gvpo_worked_example(form, norm, divisor):
    rows, logp_r = gvpo_vector()
    weight_r, metrics = token_weights(GVPO(form=form, norm=norm), rows, logp_r, BatchTotals.of(rows))
    e = torch.tensor([0.4625, -0.4375, -0.4875, 0.4625])
    torch.testing.assert_close(weight_r, -0.1 * e / divisor)
    if form != "nll":
        assert metrics["loss"] == pytest.approx(0.4284375 / divisor)
    d = torch.tensor([0.5, -0.5, 0.0, 0.5])
    assert metrics["kl"] == pytest.approx(float((d.exp() - 1 - d).mean()))
    assert metrics["residual_variance"] == pytest.approx(2 * 0.1428125)
    assert metrics["reward_variance"] == pytest.approx(1 / 3)


def ablation_weights(
    rows: TrainBatch, logp_r: torch.Tensor, beta: float, terms: tuple[str, ...]
) -> list[float]:
    """dL/dl_i of Table 2's ablations in plain fp64 Python, with the norm k-1."""
    lengths = rows.length_n.tolist()
    l = [float(part.double().sum()) for part in logp_r.split(lengths)]  # noqa: E741
    ref = [float(part.double().sum()) for part in rows.ref_logp_r.split(lengths)]
    reward, group = rows.reward_n.tolist(), rows.group_n.tolist()
    weights = []
    for i in range(len(rows)):
        members = [j for j in range(len(rows)) if group[j] == group[i]]

        def centred(value: list[float], i: int = i, members: list[int] = members) -> float:
            return value[i] - sum(value[j] for j in members) / len(members)

        e = centred(reward)
        e -= beta * centred(l) if "var" in terms else 0
        e += beta * centred(ref) if "cov" in terms else 0
        weights.append(-beta * e / max(len(members) - 1, 1) / len(set(group)))
    return weights


@pytest.mark.parametrize(
    ("form", "terms"),
    [
        *product(["mse", "variance", "nll"], [("var", "cov"), ("var",)]),
        *product(["mse"], [("cov",), ()]),  # without var, there is one form
    ],
)
def test_gvpo_forms_and_ablations_on_ragged_groups(form, terms):
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5], [2.0], [1, -3]])
    logp_r = make_logp(rows)
    weight_n = sequence_weights(GVPO(beta=0.3, form=form, terms=terms), rows, logp_r)
    assert weight_n.tolist() == pytest.approx(ablation_weights(rows, logp_r, 0.3, terms), abs=1e-6)
    assert rows.group_mean(weight_n).abs().max() < 1e-7
    if terms:  # a group with equal rewards still pulls where its drifts differ
        assert weight_n[4:7].abs().min() > 1e-4


def test_gvpo_group_mean_may_be_detached():
    rows, logp_r = gvpo_vector()
    logp_r.requires_grad_()
    d = logp_r - rows.ref_logp_r
    gradients = []
    for mean in (d.mean(), d.mean().detach()):
        loss = 0.5 * ((0.1 * (d - mean) - (rows.reward_n - rows.reward_n.mean())) ** 2).sum() / 3
        gradients.append(torch.autograd.grad(loss, logp_r, retain_graph=True)[0])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], sequence_weights(GVPO(), rows, logp_r))


def test_gvpo_without_drift_is_reinforce_with_group_baseline():
    rows = make_rows([[1, 0, 0, 1], [0, 3, 0]])
    rows = rows.with_columns(ref_logp_r=make_logp(rows))
    advantage_n = Estimator()(rows)[0]
    k_minus_1 = torch.tensor([3.0] * 4 + [2.0] * 3)
    expected = -0.1 * advantage_n / k_minus_1 / 2
    torch.testing.assert_close(sequence_weights(GVPO(), rows, make_logp(rows)), expected)


def test_gvpo_keeps_precision_on_long_sequences():
    """l and l' are sums over 30,000 tokens with a small difference: the code subtracts first, then sums.

    In the other order these fp32 sums would give a drift of 0.24 instead of 3.0.
    """
    rows = make_rows([[0, 0]], lengths=[30_000, 30_000])
    ref_r = torch.full((60_000,), -1.0)
    logp_r = ref_r + torch.tensor([1e-4, -1e-4])[rows.seq_r]
    exact = (logp_r.double() - ref_r.double()).view(2, -1).sum(1)
    weight_n = sequence_weights(GVPO(beta=1.0), rows.with_columns(ref_logp_r=ref_r), logp_r)
    expected = exact - exact.mean()
    assert weight_n.tolist() == pytest.approx(expected.tolist(), rel=1e-3)
