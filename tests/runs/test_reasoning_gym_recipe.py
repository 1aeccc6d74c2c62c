"""The recipe that needs no download: a tiny model trains two steps on generated problems."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.servers.reward_models import make_judge
from helpers.tiny_run import fit

from megatron_gvpo.observe import read_metrics
from megatron_gvpo.settings.config import load_config

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


def test_the_recipe_trains_and_evaluates_on_two_cores(tmp_path: Path):
    files = [ROOT / "examples" / "recipes" / "reasoning_gym.yaml", ROOT / "examples" / "cpu.yaml"]
    model = make_judge(tmp_path / "model")
    small = ("train.steps=2", "train.prompts_per_step=4", "rollout.n=2", "rollout.max_tokens=8")
    evaluated = ("eval.every=0", "eval.n=1", "data.eval.limit=4", "checkpoint.export_hf=false")
    out = f"output_dir={tmp_path / 'run'}"
    config = load_config(files, [f"model.path={model}", *small, *evaluated, out, "logging.progress=lines"])
    fit(config)
    [before, *_, last] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert last["step"] == 2 and 0 <= last["reward/reasoning_gym"] <= 1 and last["reward/errors"] == 0
    assert "eval/pass@1" in before and "eval/pass@1" in last
