"""Which corrections give the gradient of the policy that trains from another policy's samples.

The policies are tables: the probabilities of every token after every prefix, so that all responses can be
enumerated, and expectations are sums. A response ends with token 0, or after three tokens.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gvpo.algorithms.base import token_weights
from megatron_gvpo.algorithms.losses.pg import PolicyGradient
from megatron_gvpo.types import BatchTotals, TrainBatch

LONGEST, VOCABULARY = 3, 3
PREFIXES = [p for n in range(LONGEST) for p in itertools.product(range(1, VOCABULARY), repeat=n)]
RESPONSES = [(*prefix, last) for prefix in PREFIXES for last in range(VOCABULARY)]
RESPONSES = [y for y in RESPONSES if y[-1] == 0 or len(y) == LONGEST]
WITHOUT_CAP = 1e12


def policies() -> tuple[Tensor, Tensor, list[float]]:
    """Logits of the trainer and of the engine, fp64 [prefix, token], and the rewards of responses."""
    generator = torch.Generator().manual_seed(0)
    trainer = torch.randn(len(PREFIXES), VOCABULARY, generator=generator, dtype=torch.float64)
    engine = trainer + 0.5 * torch.randn(trainer.shape, generator=generator, dtype=torch.float64)
    rewards = torch.rand(len(RESPONSES), generator=generator, dtype=torch.float64)
    return trainer, engine, rewards.tolist()


def log_probs(logits: Tensor) -> list[Tensor]:
    """Log-probs of the tokens of every response."""
    table = logits.log_softmax(-1)
    return [torch.stack([table[PREFIXES.index(y[:t]), y[t]] for t in range(len(y))]) for y in RESPONSES]


def true_gradient(logits: Tensor, rewards: list[float]) -> Tensor:
    """Gradient of the expected reward of the trainer's policy."""
    logits = logits.clone().requires_grad_()
    value = sum(r * logp.sum().exp() for r, logp in zip(rewards, log_probs(logits), strict=True))
    return torch.autograd.grad(value, logits)[0]


def expected_gradient(importance: dict[str, Any] | None, baseline: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss's expected gradient over the engine's samples, and the true one, by the logits."""
    trainer, engine, rewards = policies()
    logits = trainer.clone().requires_grad_()
    logp, by_engine = log_probs(logits), log_probs(engine)
    count = len(RESPONSES)
    rows = TrainBatch(
        prompt_ids=[(1,)] * count,
        response_ids=list(RESPONSES),
        group_n=torch.zeros(count, dtype=torch.int64),
        reward_n=torch.tensor(rewards, dtype=torch.float64),
        truncated_n=torch.zeros(count, dtype=torch.bool),
        # Every response once, with its probability under the engine: the mean over samples is a sum.
        advantage_n=torch.stack(
            [count * x.sum().exp() * (r - baseline) for x, r in zip(by_engine, rewards, strict=True)]
        ),
        old_logp_r=torch.cat(logp).detach(),
        engine_logp_r=torch.cat(by_engine),
    )
    loss = PolicyGradient(importance=importance, aggregation={"name": "sequence_sum", "constant": 1})
    weight_r, _ = token_weights(loss, rows, torch.cat(logp), BatchTotals.of(rows))
    (gradient,) = torch.autograd.grad(-(weight_r * torch.cat(logp)).sum(), logits)
    return gradient, true_gradient(trainer, rewards)


def bias(importance: dict[str, Any] | None, baseline: float = 0.0) -> float:
    """Distance from the true gradient, as a share of its norm."""
    gradient, true = expected_gradient(importance, baseline)
    return float((gradient - true).norm() / true.norm())


def test_all_responses_are_enumerated():
    trainer, engine, _ = policies()
    for logits in (trainer, engine):
        assert float(sum(x.sum().exp() for x in log_probs(logits))) == pytest.approx(1)


@pytest.mark.parametrize("baseline", [0.0, 0.4])
def test_sequence_importance_without_cap_is_unbiased(baseline):
    assert bias({"level": "sequence", "cap": WITHOUT_CAP}, baseline) < 1e-12


@pytest.mark.parametrize(
    "importance",
    [
        None,
        {"cap": WITHOUT_CAP},  # the weights of the tokens before are missing
        {"level": "geometric", "cap": WITHOUT_CAP},
        {"cap": 1.1},
        {"level": "sequence", "cap": 1.1},
        {"name": "mask"},
        {"name": "mask", "level": "sequence", "high": 1.3},
        {"name": "reject", "level": "geometric", "low": 0.8, "high": 1.2},
    ],
    ids=str,
)
def test_the_others_are_biased(importance):
    assert bias(importance) > 0.01


def test_the_cap_trades_bias_for_variance():
    """A larger cap means less bias and a larger second moment of the weights."""
    trainer, engine, _ = policies()
    ratios = [
        (float((b - a).sum().exp()), float(a.sum().exp()))
        for a, b in zip(log_probs(engine), log_probs(trainer), strict=True)
    ]
    caps = [1.1, 1.5, 2.0, 3.0]
    moments = [sum(p * min(ratio, cap) ** 2 for ratio, p in ratios) for cap in caps]
    biases = [bias({"level": "sequence", "cap": cap}) for cap in caps]
    assert moments == sorted(moments) and biases == sorted(biases, reverse=True)
    assert max(ratio for ratio, _ in ratios) > 2


def test_rejection_is_the_gradient_under_what_is_kept():
    """Rejected samples are those of the engine's policy, restricted to the kept responses."""
    trainer, engine, rewards = policies()
    logits = trainer.clone().requires_grad_()
    own, by_engine = log_probs(logits), log_probs(engine)
    wanted = torch.zeros(())
    for y, (a, b) in enumerate(zip(by_engine, own, strict=True)):
        ratio = math.exp(float((b - a).sum()))
        if 0.7 <= ratio <= 1.4:
            wanted = wanted + a.sum().exp() * rewards[y] * b.sum()
    (expected,) = torch.autograd.grad(wanted, logits)
    gradient, _ = expected_gradient({"name": "reject", "level": "sequence", "low": 0.7, "high": 1.4})
    torch.testing.assert_close(gradient, expected)
