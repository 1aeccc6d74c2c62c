"""examples/minimal_loop.py: the whole of GVPO in one file, on the tests' tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT
from transformers import AutoModelForCausalLM

from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.types import TrainBatch

FILE = ROOT / "examples" / "minimal_loop.py"


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FILE, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=1500
    )


def test_it_trains_and_is_short_enough_to_read(task: Path, tmp_path: Path):
    data = task / "data"
    where = ["--model", task / "model", "--train", data / "train.jsonl", "--test", data / "test.parquet"]
    done = run(*where, "--out", tmp_path / "out", "--steps", "2", "--lr", "1e-2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 2: reward" in done.stdout and "after 2 steps: held-out pass@1" in done.stdout
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (task / "model", tmp_path / "out")
    )
    assert any(not torch.equal(before[name], after[name]) for name in before), "the weights have moved"
    assert len(FILE.read_text().splitlines()) <= 300


def test_without_the_quickstart_it_says_what_is_missing(tmp_path: Path):
    done = run(cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: runs/quickstart/sft/hf is missing: `make quickstart` makes it\n"


def test_other_data_and_a_wrong_rate_are_named(task: Path, tmp_path: Path):
    (tmp_path / "other.jsonl").write_text('{"question": "2+2=", "answer": 4}\n')
    where = ["--model", task / "model", "--test", tmp_path / "other.jsonl"]
    done = run(*where, "--train", tmp_path / "other.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith(f"error: {where[-1]}, record 1: there is no field prompt\n")
    done = run(*where, "--train", tmp_path / "other.jsonl", "--lr", "nan", cwd=tmp_path)
    assert done.returncode == 2 and "--lr nan: want" in done.stderr


def test_log_probs_are_those_of_sequences_alone(task: Path, monkeypatch: pytest.MonkeyPatch):
    """Padding and division into forward passes change nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import minimal_loop

    monkeypatch.setattr(minimal_loop, "ROWS", 2)
    policy = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    lengths = [(3, 5), (7, 1), (2, 9)]
    pairs = [([5 + i % 20 for i in range(a)], [9 + i % 15 for i in range(b)]) for a, b in lengths]
    rows = TrainBatch.from_groups(
        [Group(Prompt("p", tuple(prompt), ""), [Rollout(ids, [], "", "stop")]) for prompt, ids in pairs]
    )
    with torch.no_grad():
        logp_r = minimal_loop.log_probs(policy, rows)
        alone = []
        for prompt, ids in pairs:
            logp = torch.log_softmax(policy(torch.tensor([prompt + ids])).logits[0].double(), -1)
            alone += [logp[len(prompt) - 1 + i, token].item() for i, token in enumerate(ids)]
    torch.testing.assert_close(logp_r.double(), torch.tensor(alone, dtype=torch.float64), atol=1e-5, rtol=0)
