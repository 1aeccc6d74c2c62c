"""Losses and gradients against TRL's own code, on the same log-probs, advantages, lengths and references.

TRL runs in an environment of its own, because its requirements would change the versions that the package is
tested with; benchmarks/step_vs_trl.py builds it once in the user's cache. TRL takes our advantages as inputs;
test_estimators.py and test_family.py test those.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs.rows import make_logp, make_rows
from helpers.paths import HELPERS
from helpers.suite.real_parts import used

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.base import Loss, token_weights
from megatron_gvpo.algorithms.losses.dpo import DPO
from megatron_gvpo.algorithms.losses.pg import CISPO, PolicyGradient
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.types import BatchTotals, TrainBatch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

GRPO = Estimator(scale="group_std")
BETWEEN = {"name": "mask", "low": 0.7, "high": 1.4}
OURS: dict[str, tuple[Loss, Estimator | None]] = {
    "grpo": (PPO(kl_coef=0.04), GRPO),
    "dr_grpo": (PPO(aggregation={"name": "sequence_sum", "constant": 10}), Estimator()),
    "dapo": (PPO(clip_high=0.28, aggregation="token_mean"), GRPO),
    "bnpo": (PPO(aggregation="token_mean"), GRPO),
    "gspo": (PPO(ratio="sequence", clip_low=0.01, clip_high=0.02), GRPO),
    "cispo": (CISPO(clip_high=0.2), GRPO),
    "rloo": (PolicyGradient(aggregation={"name": "sequence_sum", "constant": 1}), Estimator(baseline="loo")),
    "dpo": (DPO(beta=0.3), None),
    "token truncation": (PPO(kl_coef=0.04, importance={"cap": 1.2}), GRPO),
    "sequence truncation": (PPO(importance={"level": "sequence", "cap": 1.2}), GRPO),
    "token mask": (CISPO(clip_high=0.2, importance=BETWEEN), GRPO),
    "sequence mask": (PPO(importance={**BETWEEN, "level": "sequence", "low": 0.3, "high": 3}), GRPO),
}


def corrected(mode: str, low: float | None, high: float) -> dict[str, Any]:
    """TRL's options for an engine that differs from the trainer."""
    option = "vllm_importance_sampling"
    return {
        "use_vllm": True,
        f"{option}_correction": True,
        f"{option}_mode": mode,
        f"{option}_clip_min": low,
        f"{option}_clip_max": high,
    }


TRL: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 10},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.01,
        "epsilon_high": 0.02,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},  # there the bound itself, here what is above 1
    "rloo": {},
    "token truncation": {"loss_type": "grpo", "beta": 0.04, **corrected("token_truncate", None, 1.2)},
    "sequence truncation": {"loss_type": "grpo", **corrected("sequence_truncate", None, 1.2)},
    "token mask": {"loss_type": "cispo", "epsilon_high": 1.2, **corrected("token_mask", 0.7, 1.4)},
    "sequence mask": {"loss_type": "grpo", **corrected("sequence_mask", 0.3, 3)},
}


def material(name: str) -> tuple[TrainBatch, torch.Tensor]:
    """Rows and log-probs. TRL's DPO takes one pair of a prompt, so no two of its rewards are the best."""
    first = [0.8, 0.1, 0, 1] if name == "dpo" else [1, 0, 0, 1]
    rows = make_rows([first, [0.5, 0.2, 0.9], [0, 0, 0]])
    return rows, make_logp(rows)


def padded(rows: TrainBatch, value_r: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(value_r.split(rows.length_n.tolist())), batch_first=True)


def pairs(rows: TrainBatch) -> list[int]:
    """Indices of the best rows, then of the worst rows, of the groups that have both."""
    chosen, rejected = [], []
    for g in rows.group_n.unique().tolist():
        members = (rows.group_n == g).nonzero().flatten().tolist()
        best, worst = (f(members, key=lambda i: float(rows.reward_n[i])) for f in (max, min))
        if rows.reward_n[best] > rows.reward_n[worst]:
            chosen.append(best)
            rejected.append(worst)
    return chosen + rejected


def inputs_of(name: str) -> tuple[TrainBatch, torch.Tensor]:
    """Rows with the advantages of a method, and the policy's log-probs.

    For RLOO the policy is the one that sampled: TRL, unlike the paper, clips the ratios of whole sequences,
    and only there is their gradient that of REINFORCE.
    """
    rows, logp_r = material(name)
    estimator = OURS[name][1]
    rows = rows if estimator is None else rows.with_columns(advantage_n=estimator(rows)[0])
    return rows, rows.old_logp_r if name == "rloo" else logp_r


@pytest.fixture(scope="module")
def by_trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, torch.Tensor]]:
    import step_vs_trl

    directory, cases = tmp_path_factory.mktemp("trl"), {}
    for name in OURS:
        rows, logp_r = inputs_of(name)
        columns = {"logp": logp_r, "old": rows.old_logp_r, "ref": rows.ref_logp_r}
        columns["engine"] = rows.engine_logp_r
        data = {key: padded(rows, value_r) for key, value_r in columns.items()}
        data["mask"] = padded(rows, torch.ones_like(logp_r))
        case: dict[str, Any] = {"kind": name if name in ("rloo", "dpo") else "grpo", "data": data}
        if name == "dpo":
            case |= {"order": pairs(rows), "beta": 0.3}
        else:
            case |= {"settings": TRL[name], "advantages": rows.advantage_n}
        cases[name] = case
    torch.save(cases, directory / "in.pt")
    python, worker = step_vs_trl.make_environment(), HELPERS / "references" / "trl_worker.py"
    command = [str(python), str(worker), str(directory / "in.pt"), str(directory / "out.pt")]
    compiled = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # TRL's imports take 7 s, and otherwise 16
    done = subprocess.run(command, env=compiled, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    results: dict[str, tuple[float, torch.Tensor]] = torch.load(directory / "out.pt", weights_only=False)
    return results


@pytest.mark.parametrize("name", OURS)
def test_loss_and_gradient_are_trls(by_trl, name):
    rows, logp_r = inputs_of(name)
    weight_r, metrics = token_weights(OURS[name][0], rows, logp_r, BatchTotals.of(rows))
    loss, gradient = by_trl[name]
    used("TRL's losses")
    share = 2 / 3 if name == "dpo" else 1.0  # TRL has no group without a pair; ours counts in the mean
    torch.testing.assert_close(padded(rows, weight_r), share * gradient, atol=1e-7, rtol=1e-5)
    if name != "rloo":  # -A log pi against -A ratio
        assert float(metrics["loss"]) == pytest.approx(share * loss, rel=1e-5, abs=1e-7)
    assert gradient.abs().max() > 1e-3
