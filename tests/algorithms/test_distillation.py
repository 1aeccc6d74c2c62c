"""On-policy distillation against its formulas, and against the true gradient of reverse KL.

The policy of the gradient tests is a table: logits for every prefix of responses of `LENGTH` tokens out of
`V`. All responses are enumerated, so expectations under the policy are sums.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.inputs.rows import make_rows
from torch import Tensor

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.base import Reference
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.distillation import Distillation
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

V, LENGTH = 3, 3
PREFIXES = {p: i for i, p in enumerate(p for n in range(LENGTH) for p in product(range(V), repeat=n))}
RESPONSES = list(product(range(V), repeat=LENGTH))
PLACE_NT = torch.tensor([[PREFIXES[y[:t]] for t in range(LENGTH)] for y in RESPONSES])
TOKEN_NT = torch.tensor(RESPONSES)


def table(seed: int) -> Tensor:
    """Log-probs of every token after every prefix, fp64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(PREFIXES), V, dtype=torch.float64, generator=generator).log_softmax(-1)


def token_logps(logp_pv: Tensor) -> Tensor:
    """[responses, tokens]"""
    return logp_pv[PLACE_NT, TOKEN_NT]


def gradient_of(recipe: object, logits_pv: Tensor, teacher_pv: Tensor) -> Tensor:
    """The gradient that the recipe expects under the policy, times the tokens of a response."""
    algorithm = AlgorithmConfig.model_validate(recipe)
    logits_pv = logits_pv.clone().requires_grad_()
    logp_nt, teacher_nt = token_logps(logits_pv.log_softmax(-1)), token_logps(teacher_pv)
    probability_n = logp_nt.detach().sum(-1).exp()
    total = logits_pv.new_zeros(())
    for i, response in enumerate(RESPONSES):
        rows = TrainBatch(
            prompt_ids=[(9,)],
            response_ids=[response],
            group_n=torch.zeros(1, dtype=torch.int64),
            reward_n=torch.zeros(1),
            truncated_n=torch.zeros(1, dtype=torch.bool),
            old_logp_r=logp_nt[i].detach(),
            ref_logp_r=teacher_nt[i],
        )
        rows, _ = algorithm.estimator.fill(rows)
        share, _ = algorithm.loss(LossInputs(rows, logp_nt[i], BatchTotals.of(rows)))
        total = total + LENGTH * probability_n[i] * share
    return torch.autograd.grad(total, logits_pv)[0]


def test_an_undiscounted_gradient_is_that_of_the_kl_of_responses():
    teacher_pv = table(1)
    logits_pv = table(0).requires_grad_()
    logp_n = token_logps(logits_pv.log_softmax(-1)).sum(-1)
    kl = (logp_n.exp() * (logp_n - token_logps(teacher_pv).sum(-1))).sum()
    (expected_pv,) = torch.autograd.grad(kl, logits_pv)
    found_pv = gradient_of({"recipe": "opd", "estimator": {"discount": 1}}, logits_pv.detach(), teacher_pv)
    assert expected_pv.abs().max() > 0.05
    torch.testing.assert_close(found_pv, expected_pv, rtol=0, atol=1e-6)


def test_the_gradient_of_the_recipe_is_that_of_the_kl_at_the_places_that_the_policy_visits():
    teacher_pv = table(1)
    logits_pv = table(0).requires_grad_()
    logp_pv = logits_pv.log_softmax(-1)
    probability_n = token_logps(logp_pv).sum(-1).exp().detach()
    visited_p = torch.zeros(len(PREFIXES), dtype=torch.float64)
    visited_p.index_add_(0, PLACE_NT.flatten(), probability_n.repeat_interleave(LENGTH))
    kl_p = (logp_pv.exp() * (logp_pv - teacher_pv)).sum(-1)
    (expected_pv,) = torch.autograd.grad((visited_p * kl_p).sum(), logits_pv)
    found_pv = gradient_of("opd", logits_pv.detach(), teacher_pv)
    torch.testing.assert_close(found_pv, expected_pv, rtol=0, atol=1e-6)
    assert gradient_of("opd", teacher_pv, teacher_pv).abs().max() < 1e-7, "nothing is left to learn"


@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
def test_advantages_are_the_formula(discount):
    rows = make_rows([[1, 0, 1], [0, 0]], lengths=[3, 1, 4, 2, 5])
    own = Estimator(scale="group_std")
    advantage_r, metrics = Distillation(coef=0.5, discount=discount, rewards=own)(rows)
    old_r, teacher_r = rows.old_logp_r.double(), rows.ref_logp_r.double()
    of_rewards_n, _ = own(rows)
    expected = []
    for row, (begin, end) in enumerate(zip(rows.offsets, rows.offsets[1:], strict=False)):
        for t in range(begin, end):
            gains = [discount ** (s - t) * (teacher_r[s] - old_r[s]) for s in range(t, end)]
            expected.append(float(of_rewards_n[row] + 0.5 * sum(gains)))
    assert advantage_r.dtype == torch.float32
    assert advantage_r.tolist() == pytest.approx(expected, abs=1e-6)
    assert float(metrics["teacher_kl"]) == pytest.approx(float((old_r - teacher_r).mean()))
    assert "valid_fraction" in metrics


def test_responses_without_tokens_have_no_advantages():
    rows = make_rows([[1, 0], [0]], lengths=[0, 2, 0])
    assert Distillation(discount=0.5)(rows)[0].shape == (2,)
    empty = make_rows([[1, 0]], lengths=[0, 0])
    assert Distillation()(empty)[0].shape == (0,) and Distillation()(empty)[1]["teacher_kl"] == 0


def test_the_recipe_needs_no_rewards_and_a_mixture_does(good):
    taught = ("teacher={path: big, server: {}}", "rewards.components=[]", "data.train.answer_key=null")
    config = load_config([good], ["algorithm=opd", "rollout.n=1", *taught])
    assert not config.algorithm.needs_group and config.algorithm.needs_teacher
    with pytest.raises(ConfigError, match="learns from rewards, and all would be 0"):
        load_config([good], ["algorithm=opd_rewards", *taught])
    with pytest.raises(ConfigError, match=r"rollout\.n=1: this algorithm compares"):
        load_config([good], ["algorithm=opd_rewards", "rollout.n=1", taught[0]])


def test_a_policy_may_learn_from_its_own_average_and_not_from_itself(good):
    config = load_config([good], ["algorithm=self_distillation"])
    assert config.algorithm.kept_reference == Reference(name="ema", decay=0.99)
    assert not config.algorithm.needs_teacher
    with pytest.raises(ConfigError, match="the policy would learn from itself"):
        load_config([good], ["algorithm=self_distillation", "algorithm.estimator.reference=step_start"])


@pytest.mark.parametrize("reference", ["fixed", "{name: ema, decay: 0.9}"])
@pytest.mark.parametrize("block", ["opd: estimator", "opd_full: loss.divergence"])
def test_a_policy_that_only_learns_from_what_it_begins_as_is_refused(good, reference: str, block: str):
    """Its loss is 0 but for rounding, which AdamW scales up to whole steps."""
    recipe, key = block.split(": ")
    overrides = [f"algorithm={recipe}", f"algorithm.{key}.reference={reference}"]
    with pytest.raises(ConfigError, match=rf"{key}.reference=(fixed|ema .*): the policy begins as this"):
        load_config([good], overrides)
    load_config([good], [*overrides, "algorithm.loss.entropy_coef=0.01"])
