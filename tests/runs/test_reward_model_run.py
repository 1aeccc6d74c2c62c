"""A run whose reward model fails for some responses: these leave, others train, and the record names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers.servers.reward_models import make_reward_model, scores, standing_in
from helpers.tiny_run import GVPO, SHORT, configure, fit

from megatron_gvpo.observe import read_metrics
from megatron_gvpo.observe.rollouts.reader import read_rollouts

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


def test_responses_without_a_score_train_nothing(task: Path, tmp_path: Path):
    model = make_reward_model(tmp_path / "model", "qwen2")

    started = False

    def answer(path: str, body: Any) -> Any:
        nonlocal started
        refused = started and body is not None and any(sum(ids) % 3 == 0 for ids in body["input_ids"])
        started = body is not None  # the probe comes first
        return 400 if refused else scores(lambda ids: 1 + len(ids) / 64)(path, body)

    with standing_in(answer) as url:
        served = {"path": str(model), "batch_size": 4, "servers": {"urls": [url]}}
        components = [
            {"name": "quality", "model": served},
            {"name": "variety", "weight": 0.5, "function": f"{task}/reward.py:reward"},
        ]
        own = (f"rewards.components={json.dumps(components)}", "rewards.max_lost=0.95", "train.steps=2")
        out = tmp_path / "run"
        held_out = (f"data.eval={{path: {task}/data/test.parquet, limit: 4}}", "eval.n=8")
        fit(configure(task, out, *GVPO, *SHORT, "rollout.n=8", *own, *held_out))

    last = list(read_metrics(out / "metrics.jsonl"))[-1]
    assert 0 < last["reward/lost"] < 0.95
    evaluated = read_rollouts(out, "eval", [2])
    assert last["eval/lost"] == 1 - len(evaluated) / 32 > 0
    rows = pq.read_table(out / "rollouts" / "step_000002.parquet").to_pylist()
    assert len(rows) < 32
    for row in rows:
        assert row["rewards"]["quality"] > 1
        assert row["reward"] == pytest.approx(row["rewards"]["quality"] + 0.5 * row["rewards"]["variety"])
    record = json.loads((out / "run.json").read_text())
    digest = record["files"]["rewards.components.0.model.path"]["sha256"]
    assert last["reward/quality/model_hash"] == int(digest[:8], 16)
    assert last["reward/quality/probe"] > 1
