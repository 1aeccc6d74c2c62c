"""Truncated importance weights against their formula in fp64, one token at a time.

test_gradient_invariance.py tests them on real ranks.
"""

from __future__ import annotations

import pytest
import torch
from rows import make_logp, make_rows

from megatron_gvpo.algorithms.base import Loss, token_weights
from megatron_gvpo.algorithms.losses.importance import TruncatedImportance
from megatron_gvpo.algorithms.losses.pg import PolicyGradient
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.types import BatchTotals, TrainBatch

CAP = {"cap": 1.3}
LOSSES: dict[str, Loss] = {
    "pg": PolicyGradient(importance=CAP),
    "pg, sequence mean": PolicyGradient(importance=CAP, aggregation="sequence_mean"),
    "ppo": PPO(importance=CAP),
    "ppo + kl": PPO(importance=CAP, kl_coef=0.1, aggregation="token_mean"),
}


def sampled() -> TrainBatch:
    return make_rows([[1, 0, 0, 1], [0.5, 0, 0.5], [1, -3]])


def expected_weights(loss: PolicyGradient | PPO, rows: TrainBatch, logp_r: torch.Tensor) -> torch.Tensor:
    """dL/dlogp, fp64 [r]: the gradient of each token's own term, times its weight, plus the KL's."""
    x = logp_r.double().requires_grad_()
    old, ref, engine = (column.double() for column in (rows.old_logp_r, rows.ref_logp_r, rows.engine_logp_r))
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows)):
        advantage = float(rows.advantage_n[row])
        tokens = range(rows.offsets[row], rows.offsets[row + 1])
        size = len(x) if loss.aggregation.name == "token_mean" else len(tokens) * len(rows)
        for t in tokens:
            weight = min(float(torch.exp(old[t] - engine[t])), loss.importance.cap)
            if loss.name == "pg":
                total = total - weight * advantage * x[t] / size
                continue
            ratio = (x[t] - old[t]).exp()
            clipped = min(max(float(ratio), 0.8), 1.2) * advantage
            objective = ratio * advantage if float(ratio) * advantage <= clipped else torch.tensor(clipped)
            k3 = (ref[t] - x[t]).exp() - 1 - (ref[t] - x[t])
            total = total - (weight * objective - loss.kl_coef * k3) / size
    return torch.autograd.grad(total, x)[0]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_policy_gradient_is_weighted_and_the_kl_is_not(loss):
    rows = sampled()
    logp_r = make_logp(rows)
    weight_r, metrics = token_weights(loss, rows, logp_r, BatchTotals.of(rows))
    torch.testing.assert_close(weight_r.double(), expected_weights(loss, rows, logp_r), atol=1e-6, rtol=1e-5)
    ratio_r = (rows.old_logp_r.double() - rows.engine_logp_r.double()).exp()
    assert metrics["importance"] == pytest.approx(float(ratio_r.clamp(max=1.3).mean()))
    assert metrics["importance_truncated"] == pytest.approx(float((ratio_r > 1.3).double().mean()))
    assert 0 < metrics["importance_truncated"] < 1


def test_an_engine_like_the_trainer_changes_nothing():
    rows = sampled()
    rows = rows.with_columns(engine_logp_r=rows.old_logp_r)
    for plain, weighted in ((PPO(), PPO(importance=CAP)), (PolicyGradient(), PolicyGradient(importance=CAP))):
        expected_r, _ = token_weights(plain, rows, make_logp(rows), BatchTotals.of(rows))
        weight_r, metrics = token_weights(weighted, rows, make_logp(rows), BatchTotals.of(rows))
        assert torch.equal(weight_r, expected_r)
        assert metrics["importance"] == 1 and metrics["importance_truncated"] == 0


def test_a_token_that_the_engine_thought_impossible_counts_as_the_cap():
    rows = make_rows([[1, 0]], lengths=[1, 1]).with_columns(
        old_logp_r=torch.tensor([-1.0, -1.0]), engine_logp_r=torch.tensor([-torch.inf, -2.0])
    )
    weight_r, _ = TruncatedImportance(cap=2.0)(rows, BatchTotals.of(rows))
    assert weight_r.tolist() == [2.0, 2.0]


def test_an_engine_without_log_probs_is_named():
    rows = sampled().with_columns(engine_logp_r=None)
    with pytest.raises(
        ValueError, match=r"algorithm\.loss\.importance: the rollout engine gave no log-probs"
    ):
        token_weights(PPO(importance=CAP), rows, make_logp(rows), BatchTotals.of(rows))


def test_weights_are_known_only_where_the_old_policy_is():
    assert PolicyGradient().linear and not PolicyGradient(importance=CAP).linear
    assert PPO().known_at_step_start and not PPO(importance=CAP).known_at_step_start
    assert set(PolicyGradient(importance=CAP).reference_policies) == {"old"}
