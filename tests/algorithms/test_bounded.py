"""Log-ratios far from a policy: finite losses, and gradients that point the right way."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.inputs.rows import make_rows

from megatron_gvpo.algorithms.losses import bounded
from megatron_gvpo.algorithms.losses.pg import CISPO
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.algorithms.losses.reg_grpo import RegGRPO
from megatron_gvpo.types import BatchTotals, LossInputs


def test_within_the_bounds_they_are_the_formulas():
    x = torch.linspace(-30, 10, 81, dtype=torch.float64)
    assert torch.equal(bounded.k3(x), x.exp() - 1 - x)
    y = torch.linspace(-30, 20, 51, dtype=torch.float64)
    assert torch.equal(bounded.ratio(y), y.exp())


@pytest.mark.parametrize("nats", [11.0, 20.0, 60.0, 1000.0])
def test_beyond_them_k3_is_a_line_with_the_slope_of_the_bound(nats):
    x = torch.tensor([10.0, nats], dtype=torch.float64, requires_grad=True)
    value = bounded.k3(x)
    value.sum().backward()
    slope = math.exp(10) - 1
    assert x.grad.tolist() == pytest.approx([slope, slope], rel=1e-6)
    assert value[1].item() == pytest.approx(math.exp(10) - 11 + slope * (nats - 10))
    assert bounded.ratio(torch.tensor(nats)).isfinite()


@pytest.mark.parametrize("nats", [20.0, 60.0, 100.0, 1000.0])
@pytest.mark.parametrize("loss", [PPO(kl_coef=0.1), PPO(dual_clip=3.0), CISPO(), RegGRPO(kl_coef=0.1)])
def test_a_token_far_from_the_policies_gives_a_finite_gradient(loss, nats):
    """Fails on the old code: infinity times an advantage of 0, and a gradient of 1e23 from k3."""
    rows = make_rows([[1, 0], [1, 1]], lengths=[2, 2, 2, 2])
    now_r = torch.full((8,), -1.0)
    old_r = now_r.clone()
    old_r[3] = old_r[4] = -1.0 - nats  # in a response of advantage -, and one of advantage 0
    ref_r = now_r.clone()
    ref_r[0] = nats - 1.0
    advantage_n = torch.tensor([1.0, -1.0, 0.0, 0.0])
    rows = rows.with_columns(old_logp_r=old_r, ref_logp_r=ref_r, advantage_n=advantage_n)
    logp_r = now_r.clone().requires_grad_()
    share, metrics = loss(LossInputs(rows, logp_r, BatchTotals.of(rows)))
    share.backward()
    assert share.isfinite() and logp_r.grad.isfinite().all()
    assert logp_r.grad.abs().max() < 1e10
    assert all(torch.as_tensor(value).isfinite() for value in metrics.values())
    if getattr(loss, "kl_coef", 0):
        assert logp_r.grad[0] < 0, "towards the reference, to which the token is likelier"


def test_gradients_within_the_bounds_are_those_of_the_formula_to_rounding() -> None:
    log_ratio = torch.linspace(-8, 9.9, 400).requires_grad_()
    bounded.k3(log_ratio).sum().backward()
    exact = torch.special.expm1(log_ratio.detach().double())
    torch.testing.assert_close(log_ratio.grad.double(), exact, rtol=2e-6, atol=2e-7)
