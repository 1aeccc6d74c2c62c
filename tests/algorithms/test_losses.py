"""Every loss keeps the promises that the trainer relies on: its shares add up, and its declarations are
true.
"""

from __future__ import annotations

import pytest
import torch
from helpers.inputs.rows import make_logp, make_rows

from megatron_gvpo.algorithms.base import token_weights
from megatron_gvpo.algorithms.losses.disco import DisCO
from megatron_gvpo.algorithms.losses.dpo import DPO
from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.algorithms.losses.pg import CISPO, PolicyGradient
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.algorithms.losses.reg_grpo import RegGRPO
from megatron_gvpo.algorithms.losses.supervised import NLL
from megatron_gvpo.types import BatchTotals, LossInputs

EMA = {"name": "ema", "decay": 0.9}
LOSSES = {
    "gvpo": GVPO(),
    "gvpo sum": GVPO(norm="sum", form="nll"),
    "gvpo k": GVPO(norm="k", form="variance"),
    "gvpo -cov": GVPO(terms=("var",)),
    "gvpo -var": GVPO(terms=("cov",)),
    "gvpo -var -cov": GVPO(terms=()),
    "gvpo fixed": GVPO(reference="fixed"),
    "pg": PolicyGradient(),
    "pg + importance": PolicyGradient(importance={"cap": 1.3}),
    "ppo": PPO(),
    "ppo + importance": PPO(importance={"cap": 1.3}),
    "ppo + kl": PPO(kl_coef=0.1, reference="step_start"),
    "ppo + kl ema": PPO(kl_coef=0.1, reference=EMA),
    "ppo of sequences": PPO(ratio="sequence", clip_low=0.01, clip_high=0.02),
    "ppo of items": PPO(ratio="item", clip_low=0.01, clip_high=0.02),
    "ppo, dual clip": PPO(dual_clip=1.05),
    "ppo, demonstrations by probability": PPO(demonstrations="probability"),
    "ppo, demonstrations shaped": PPO(demonstrations="shaped"),
    "ppo, demonstrations shaped, of sequences": PPO(demonstrations="shaped", ratio="sequence"),
    "ppo, demonstrations by likelihood": PPO(demonstrations="likelihood"),
    "ppo, hinted responses in their own context": PPO(cross_context=True),
    "cispo": CISPO(clip_high=0.1),
    "dpo": DPO(),
    "dpo, all pairs": DPO(pairs="all", reference=EMA),
    "reg_grpo": RegGRPO(kl_coef=0.1),
    "reg_grpo without kl": RegGRPO(),
    "disco": DisCO(),
    "disco-b": DisCO(tau=None),
    "disco of ratios": DisCO(score="ratio", tau=1.0, kl_coef=0.0),
    "drpo": DisCO(length_temperature=0.1, max_tokens=5),
    "nll": NLL(),
}
OF_GROUPS = {name: loss for name, loss in LOSSES.items() if not loss.couples_step or loss.kl_coef == 0}


@pytest.mark.parametrize("loss", OF_GROUPS.values(), ids=OF_GROUPS)
def test_shares_add_up_over_any_split_by_groups(loss):
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5], [2.0], [1, -3], [0, 1]])
    logp_r, totals = make_logp(rows), BatchTotals.of(rows)
    whole_r, undivided = token_weights(loss, rows, logp_r, totals)
    for parts in ([[0], [1], [2], [3], [4]], [[4, 1], [], [0, 3, 2]], [[2], [0, 1, 3, 4]]):
        summed = dict.fromkeys(undivided, 0.0)
        for part in parts:
            index = [i for g in part for i in range(len(rows)) if rows.group_n[i] == g]
            selected = rows.select(index)
            tokens = [t for i in index for t in range(rows.offsets[i], rows.offsets[i + 1])]
            weight_r, metrics = token_weights(loss, selected, logp_r[tokens], totals)
            torch.testing.assert_close(weight_r, whole_r[tokens])
            summed = {name: summed[name] + float(value) for name, value in metrics.items()}
        assert summed == pytest.approx({name: float(value) for name, value in undivided.items()}, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_surrogate_of_fixed_weights_has_the_gradient_of_the_loss(loss):
    """sum(w * logp) over single sequences, with groups split, has the gradient of the loss on whole groups,
    for the parameters behind the log-probs as well.
    """
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5], [1, -3]])
    totals = BatchTotals.of(rows)
    theta = torch.randn(7, requires_grad=True, generator=torch.Generator().manual_seed(3))
    features = torch.randn(totals.tokens, 7, generator=torch.Generator().manual_seed(4))

    def policy() -> torch.Tensor:
        return -torch.nn.functional.softplus(features @ theta)

    share, _ = loss(LossInputs(rows, policy(), totals))
    (expected,) = torch.autograd.grad(share, theta)
    weight_r, _ = token_weights(loss, rows, policy(), totals)
    theta.grad = None
    for i in range(len(rows)):
        span = slice(rows.offsets[i], rows.offsets[i + 1])
        (weight_r[span] * policy()[span]).sum().backward()
    torch.testing.assert_close(theta.grad, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_linear_means_that_weights_depend_on_no_log_probs(loss):
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5]])
    zeros_r = torch.zeros_like(make_logp(rows))
    others = rows.with_columns(old_logp_r=zeros_r, ref_logp_r=zeros_r)
    weights = [
        token_weights(loss, rows, make_logp(rows, 1), BatchTotals.of(rows))[0],
        token_weights(loss, rows, make_logp(rows, 2), BatchTotals.of(rows))[0],
        token_weights(loss, others, make_logp(rows, 1), BatchTotals.of(rows))[0],
    ]
    assert loss.linear == all(torch.allclose(weight_r, weights[0]) for weight_r in weights)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_known_at_step_start_means_that_zeros_serve_for_all_log_probs(loss):
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5]])
    totals = BatchTotals.of(rows)
    zeros_r = torch.zeros(totals.tokens)
    frozen = rows.with_columns(old_logp_r=zeros_r, ref_logp_r=zeros_r)
    shortcut, _ = token_weights(loss, frozen, zeros_r, totals)
    logp_r = make_logp(rows)
    at_start = {"old_logp_r": logp_r}  # what a step's first mini-batch really has
    if loss.reference_policies.get("ref", None) == PPO(kl_coef=1, reference="step_start").reference:
        at_start["ref_logp_r"] = logp_r
    exact, _ = token_weights(loss, rows.with_columns(**at_start), logp_r, totals)
    assert loss.known_at_step_start == torch.allclose(shortcut, exact, atol=1e-7)


def test_dual_clip_bounds_what_a_bad_response_costs():
    rows = make_rows([[1, 0]], lengths=[1, 1])
    rows = rows.with_columns(advantage_n=torch.tensor([-1.0, -1.0]), old_logp_r=torch.tensor([-2.0, -0.5]))
    logp_r = torch.tensor([0.0, -0.4])  # ratios e^2 and e^0.1
    weight_r, metrics = token_weights(PPO(dual_clip=3.0), rows, logp_r, BatchTotals.of(rows))
    assert float(metrics["loss"]) == pytest.approx((3 + torch.tensor(0.1).exp().item()) / 2)
    assert weight_r.tolist() == pytest.approx([0, torch.tensor(0.1).exp().item() / 2])


def test_disco_holds_the_policy_by_the_kl_of_the_whole_step():
    """A loss with `couples_step` is only called with all rows of a step, never with a micro-batch."""
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5]])
    totals = BatchTotals.of(rows)
    logp_r = (rows.old_logp_r - 0.3).requires_grad_()  # KL = 0.3
    free, _ = token_weights(DisCO(kl_coef=0.0), rows, logp_r, totals)
    constrained, metrics = token_weights(DisCO(kl_coef=10.0, kl_limit=0.1), rows, logp_r, totals)
    assert float(metrics["kl_step"]) == pytest.approx(0.3, abs=1e-6)
    torch.testing.assert_close(constrained - free, torch.full_like(constrained, -10.0 * 0.2 / totals.tokens))


def test_no_reward_in_a_pair_of_equals():
    rows = make_rows([[1, 1], [0.5]])
    weight_r, metrics = token_weights(DPO(), rows, make_logp(rows), BatchTotals.of(rows))
    assert weight_r.abs().max() == 0 and metrics["loss"] == 0


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_read_only_the_reference_policies_that_they_declare(loss):
    rows = make_rows([[1, 0, 0, 1]])
    expected, _ = token_weights(loss, rows, make_logp(rows), BatchTotals.of(rows))
    bare = rows.with_columns(
        old_logp_r=rows.old_logp_r if "old" in loss.reference_policies else None,
        ref_logp_r=rows.ref_logp_r if "ref" in loss.reference_policies else None,
        advantage_n=rows.advantage_n if loss.signal == "advantage" else None,
    )
    torch.testing.assert_close(token_weights(loss, bare, make_logp(rows), BatchTotals.of(rows))[0], expected)
