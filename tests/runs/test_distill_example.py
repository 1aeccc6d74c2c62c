"""examples/distill: its files fit together, and all trainings run, on few and short responses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from megatron_gvpo import cli
from megatron_gvpo.observe import read_metrics

EXAMPLE = "examples/distill"


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_teacher_is_trained_and_a_student_learns_from_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["make_task.py", "--out", "runs/distill/task"])
    spec = importlib.util.spec_from_file_location("distill_task", f"{EXAMPLE}/make_task.py")
    make_task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_task)
    make_task.quickstart.SIZES = {"train": 64, "test": 8}
    make_task.main()

    def train(name: str, first: str, *more: str) -> dict[str, float]:
        files = [f"{EXAMPLE}/{first}", f"{EXAMPLE}/{name}.yaml", "examples/cpu.yaml"]
        few = [
            "train.steps=2",
            "train.prompts_per_step=4",
            "optimizer.warmup_steps=1",
            "logging.progress=off",
        ]
        assert cli.main(["train", *files, *few, *more]) == 0
        return list(read_metrics(Path(f"runs/distill/{name}/metrics.jsonl")))[-1]

    train("teacher_sft", "sft.yaml")
    teacher, student = "teacher.path=runs/distill/teacher_sft/hf", "model.path=runs/distill/task/student"
    last = train("opd", "rewards.yaml", teacher, student, "rollout.max_tokens=8", "data.eval.limit=4")
    assert last["train/grad_norm"] > 0 and last["advantage/teacher_kl"] != 0


@pytest.mark.proof
def test_the_student_learns_from_the_teacher_faster_than_from_rewards():
    subprocess.run([sys.executable, f"{EXAMPLE}/run.py", "logging.progress=off"], check=True)
    curves = json.loads(Path("runs/distill/result.json").read_text())["held_out_pass_at_1"]
    rewards = curves["rewards"]
    assert curves["teacher"]["16"] > 0.85 > curves["teacher"]["0"]
    assert curves["opd_full"]["0"] == rewards["0"] < 0.8
    assert curves["opd_full"]["24"] > max(rewards.values())
