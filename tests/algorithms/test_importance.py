"""Corrections for the policy that sampled: their formulas in fp64, token by token, and what they keep.

test_importance_bias.py tests which are unbiased, test_gradient_invariance.py and test_methods_invariance.py
real ranks, and test_trl.py compares with TRL's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.inputs.rows import make_logp, make_rows

from megatron_gvpo.algorithms.base import Loss, token_weights
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.importance.base import effective_share
from megatron_gvpo.algorithms.losses.pg import CISPO, PolicyGradient
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import BatchTotals, TrainBatch

Options = dict[str, Any]
CORRECTIONS: dict[str, Options] = {
    "token truncation": {"cap": 1.3},
    "sequence truncation": {"level": "sequence", "cap": 1.3},
    "geometric truncation": {"level": "geometric", "cap": 1.1},
    "token mask": {"name": "mask", "low": 0.7, "high": 1.4},
    "sequence mask": {"name": "mask", "level": "sequence", "low": 0.6, "high": 1.6},
    "sequence mask, veto": {"name": "mask", "level": "sequence", "high": 1e9, "veto": 0.6},
    "geometric mask": {"name": "mask", "level": "geometric", "low": 0.8, "high": 1.2},
    "token rejection": {"name": "reject", "low": 0.7, "high": 1.4},
    "sequence rejection": {"name": "reject", "level": "sequence", "low": 0.6, "high": 1.6},
    "geometric rejection, veto": {"name": "reject", "level": "geometric", "low": 0.8, "high": 2, "veto": 0.5},
}
LOSSES: dict[str, Loss] = {
    "pg": PolicyGradient(importance={"cap": 1.3}),
    "pg, sequence mean": PolicyGradient(importance={"cap": 1.3}, aggregation="sequence_mean"),
    "pg, sequence mask": PolicyGradient(importance=CORRECTIONS["sequence mask"]),
    "ppo": PPO(importance={"cap": 1.3}),
    "ppo + kl": PPO(importance={"cap": 1.3}, kl_coef=0.1, aggregation="token_mean"),
    "ppo + kl, token mask": PPO(importance=CORRECTIONS["token mask"], kl_coef=0.1),
    "cispo, geometric": CISPO(importance=CORRECTIONS["geometric truncation"], clip_high=0.1),
}


def sampled() -> TrainBatch:
    return make_rows([[1, 0, 0, 1], [0.5, 0, 0.5], [1, -3]])


def expected(options: Options, rows: TrainBatch) -> tuple[list[float], list[bool], list[bool]]:
    """Weight, truncated and dropped of every token, by the formulas, one token at a time."""
    level, name = options.get("level", "token"), options.get("name", "truncate")
    weights, cut, dropped = [], [], []
    for row in range(len(rows)):
        span = slice(rows.offsets[row], rows.offsets[row + 1])
        ratios = (rows.old_logp_r[span].double() - rows.engine_logp_r[span].double()).exp().tolist()
        product = math.prod(ratios)
        vetoed = any(ratio < options.get("veto", 0) for ratio in ratios)
        for own in ratios:
            ratio = {"token": own, "sequence": product, "geometric": product ** (1 / len(ratios))}[level]
            cut.append(name == "truncate" and ratio > options["cap"])
            out = name != "truncate" and not options.get("low", 0) <= ratio <= options["high"]
            dropped.append(out or vetoed)
            remaining_weight = 1.0 if name == "reject" else options["cap"] if cut[-1] else ratio
            weights.append(0.0 if dropped[-1] else remaining_weight)
    return weights, cut, dropped


@pytest.mark.parametrize("options", CORRECTIONS.values(), ids=CORRECTIONS)
def test_weights_and_metrics_are_those_of_the_formulas(options):
    rows = sampled()
    weights, cut, dropped = expected(options, rows)
    importance = PolicyGradient(importance=options).importance
    weight_r, metrics = importance(rows, BatchTotals.of(rows))
    torch.testing.assert_close(weight_r.double(), torch.tensor(weights).double(), atol=1e-6, rtol=2e-6)
    gone = [all(dropped[a:b]) for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]
    count = len(weights)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "importance": sum(weights) / count,
            "importance_square": sum(w * w for w in weights) / count,
            "importance_truncated": sum(cut) / count,
            "importance_masked": sum(dropped) / count,
            "importance_masked_responses": sum(gone) / len(rows),
        },
        rel=1e-5,
    )
    assert 0 < sum(cut) + sum(dropped) < count  # it does something, and not to all
    share = effective_share({name: float(value) for name, value in metrics.items()})["importance_ess"]
    assert share == pytest.approx(sum(weights) ** 2 / count / sum(w * w for w in weights))


def expected_gradient(loss: Any, rows: TrainBatch, logp_r: torch.Tensor) -> torch.Tensor:
    """dL/dlogp, fp64 [r]: the gradient of each token's own term, times its weight, plus the KL's.

    The normaliser counts what is dropped.
    """
    x = logp_r.double().requires_grad_()
    old, ref = rows.old_logp_r.double(), rows.ref_logp_r.double()
    options = loss.importance.model_dump(exclude_none=True)
    weights, _, _ = expected(options, rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows)):
        advantage = float(rows.advantage_n[row])
        tokens = range(rows.offsets[row], rows.offsets[row + 1])
        size = len(x) if loss.aggregation.name == "token_mean" else len(tokens) * len(rows)
        for t in tokens:
            ratio = (x[t] - old[t]).exp()
            if loss.name == "pg":
                objective, k3 = advantage * x[t], 0.0
            elif loss.name == "cispo":
                objective, k3 = min(float(ratio), 1 + loss.clip_high) * advantage * x[t], 0.0
            else:
                clipped = min(max(float(ratio), 0.8), 1.2) * advantage
                unclipped = ratio * advantage
                objective = unclipped if float(unclipped) <= clipped else torch.tensor(clipped)
                k3 = loss.kl_coef * ((ref[t] - x[t]).exp() - 1 - (ref[t] - x[t]))
            total = total - (weights[t] * objective - k3) / size
    return torch.autograd.grad(total, x)[0]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_policy_gradient_is_weighted_and_the_kl_is_not(loss):
    rows = sampled()
    logp_r = make_logp(rows)
    weight_r, _ = token_weights(loss, rows, logp_r, BatchTotals.of(rows))
    torch.testing.assert_close(weight_r.double(), expected_gradient(loss, rows, logp_r), atol=1e-6, rtol=1e-5)


def test_dropped_tokens_stay_in_the_normaliser():
    """verl and slime divide by the tokens that are left: the same gradient times 1 / (1 - masked share)."""
    rows, masked = sampled(), PolicyGradient(importance=CORRECTIONS["sequence mask"])
    logp_r, totals = make_logp(rows), BatchTotals.of(rows)
    weight_r, metrics = token_weights(masked, rows, logp_r, totals)
    _, _, dropped = expected(CORRECTIONS["sequence mask"], rows)
    remaining_indices = [i for i in range(len(rows)) if not dropped[rows.offsets[i]]]
    remaining_rows = rows.select(remaining_indices)
    of_left_r, _ = token_weights(
        masked, remaining_rows, logp_r[~torch.tensor(dropped)], BatchTotals.of(remaining_rows)
    )
    factor = 1 / (1 - float(metrics["importance_masked"]))
    assert factor > 1.1
    torch.testing.assert_close(factor * weight_r[~torch.tensor(dropped)], of_left_r)


@pytest.mark.parametrize("options", CORRECTIONS.values(), ids=CORRECTIONS)
def test_an_engine_like_the_trainer_changes_nothing(options):
    rows = sampled()
    rows, totals = rows.with_columns(engine_logp_r=rows.old_logp_r), BatchTotals.of(rows)
    for kind in (PPO, PolicyGradient, CISPO):
        expected_r, _ = token_weights(kind(), rows, make_logp(rows), totals)
        weight_r, metrics = token_weights(kind(importance=options), rows, make_logp(rows), totals)
        assert torch.equal(weight_r, expected_r)
        assert metrics["importance"] == 1
        assert metrics["importance_truncated"] == metrics["importance_masked"] == 0
        assert kind(importance=options).derived({k: float(v) for k, v in metrics.items()}) == {
            "importance_ess": 1
        }
        assert kind().derived({"loss": 1.0}) == {}


def test_shares_of_metrics_add_up_over_micro_batches():
    rows, importance = sampled(), PPO(importance=CORRECTIONS["sequence mask, veto"]).importance
    totals = BatchTotals.of(rows)
    whole_r, undivided = importance(rows, totals)
    parts = [importance(rows.select(index), totals) for index in ([0, 1, 2], [3], [4, 5, 6, 7, 8])]
    torch.testing.assert_close(torch.cat([weight_r for weight_r, _ in parts]), whole_r)
    for name, value in undivided.items():
        torch.testing.assert_close(sum(metrics[name] for _, metrics in parts), value)


def test_a_conversation_is_one_response():
    """The product is over the own tokens of all turns: the ratio of the trajectory."""
    rows = make_rows([[1, 0]], lengths=[4, 2])
    weight_r, _ = PPO(importance=CORRECTIONS["sequence truncation"]).importance(rows, BatchTotals.of(rows))
    rows.turns = [(Turn(0), Turn(2, after=0, given=(7, 8))), ()]
    of_turns_r, _ = PPO(importance=CORRECTIONS["sequence truncation"]).importance(rows, BatchTotals.of(rows))
    assert rows.turn_r.tolist() == [0, 0, 1, 1, 0, 0]
    assert torch.equal(weight_r, of_turns_r)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"cap": 2.0}, [2, 2, 1]),
        ({"level": "sequence"}, [2, 2, 1]),
        ({"level": "geometric"}, [2, 2, 1]),
        ({"name": "mask"}, [0, math.e, 1]),
        ({"name": "mask", "level": "sequence"}, [0, 0, 1]),
        ({"name": "reject", "level": "geometric"}, [0, 0, 1]),
    ],
)
def test_impossible_tokens_and_demonstrations(options, weights):
    """A token that the engine thought impossible has an infinite ratio; no engine sampled a demonstration."""
    rows = make_rows([[1, 0]], lengths=[2, 1]).with_columns(
        old_logp_r=torch.tensor([-1.0, -1.0, -3.0]), engine_logp_r=torch.tensor([-torch.inf, -2.0, torch.nan])
    )
    weight_r, metrics = PPO(importance=options).importance(rows, BatchTotals.of(rows))
    assert weight_r.tolist() == pytest.approx(weights)
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_whose_responses_are_all_dropped_has_no_effective_samples():
    rows = sampled()
    rows = rows.with_columns(engine_logp_r=rows.old_logp_r - 5)
    loss = PPO(importance={"name": "mask", "level": "geometric"})
    weight_r, metrics = token_weights(loss, rows, make_logp(rows), BatchTotals.of(rows))
    assert not weight_r.any() and metrics["importance_masked_responses"] == 1
    assert loss.derived({name: float(value) for name, value in metrics.items()}) == {"importance_ess": 0}


@pytest.mark.parametrize(
    ("recipe", "importance", "problem"),
    [
        ("gvpo", "truncate", "loss gvpo has no such option .its optimum is the same for every sampler"),
        ("dpo", "truncate", "loss dpo has no such option .its source defines none.; the losses pg, ppo"),
        ("grpo", {"name": "mask", "low": 6}, "low=6 and high=5 at level=token: nothing lies between"),
        ("grpo", {"name": "reject", "low": 1.5}, "low=1.5 and high=5 at level=token: they drop what both"),
        ("grpo", {"name": "mask", "cap": 3}, r"mask\.cap\s+Extra inputs are not permitted"),
        ("grpo", {"level": "turn"}, "Input should be 'token', 'sequence' or 'geometric'"),
        ("grpo", "clip", "does not match any of the expected tags: 'mask', 'reject', 'truncate'"),
    ],
)
def test_what_means_nothing_is_refused(recipe, importance, problem):
    with pytest.raises(ValueError, match=problem):
        AlgorithmConfig.model_validate({"recipe": recipe, "loss": {"importance": importance}})


def test_an_engine_without_log_probs_is_named():
    rows = sampled().with_columns(engine_logp_r=None)
    with pytest.raises(
        ValueError, match=r"algorithm\.loss\.importance: the rollout engine gave no log-probs"
    ):
        token_weights(PPO(importance={"cap": 1.3}), rows, make_logp(rows), BatchTotals.of(rows))


def test_weights_are_known_only_where_the_old_policy_is():
    cap = {"cap": 1.3}
    assert PolicyGradient().linear and not PolicyGradient(importance=cap).linear
    assert PPO().known_at_step_start and not PPO(importance=cap).known_at_step_start
    assert CISPO().known_at_step_start and not CISPO(importance=cap).known_at_step_start
    assert set(PolicyGradient(importance=cap).reference_policies) == {"old"}
