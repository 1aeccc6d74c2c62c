"""A task of Harbor, in an environment of its own, with its agent Terminus 2, which asks the policy."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.doc_blocks import blocks
from helpers.inputs.chat_tokenizer import END, tokenizer
from helpers.paths import HELPERS
from helpers.programs.environments import environment_of
from helpers.servers.library_environments import Talks
from helpers.suite.real_parts import used
from helpers.tiny_run import fit, records
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_gvpo.groups import LOST
from megatron_gvpo.settings.config import load_config

TASK = {
    "instruction.md": "Write the number 42 into /app/answer.txt.",
    "environment/Dockerfile": "FROM ubuntu:24.04",
    "solution/solve.sh": "echo 42 > /app/answer.txt",
    "tests/test.sh": "grep -qsx 42 /app/answer.txt; echo $((! $?)) > /logs/verifier/reward.txt",
    "task.toml": "version = '1.0'\nverifier = {timeout_sec = 60.0}\nagent = {timeout_sec = 600.0}\n",
}


def turn(*keystrokes: str, is_complete: bool = False) -> str:
    commands = [{"keystrokes": keys, "duration": 1.0} for keys in keystrokes]
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": is_complete})


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those of the page's program, in a directory with the page's program and a task.

    The page's default is Docker. Here the task runs in bubblewrap.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copy(HELPERS / "programs" / "harbor_bubblewrap.py", tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    of_harbor = [one for one in blocks("docs/howto/agent_programs.md") if "test_harbor.py" in one.mark]
    [program] = [block.text for block in of_harbor if block.language == "python"]
    Path("harbor_program.py").write_text(program)
    Path("harbor-env").symlink_to(environment_of("harbor.txt").parents[1])
    for name, text in TASK.items():
        file = Path("task", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return {"environment": "harbor_bubblewrap:Bubblewrap"}


@pytest.mark.proof
def test_a_task_of_harbor_is_scored_by_its_own_tests(options: dict[str, Any]) -> None:
    done = turn(is_complete=True)
    settings = {"program": "harbor_program.py:run", "tokens": 30_000, "step_timeout": 300}
    with Talks(None, options, **settings) as talks:
        [right] = talks.hold([turn("echo 42 > answer.txt\n"), done, done], task="task")
        [wrong] = talks.hold([turn("echo 41 > answer.txt\n"), done, done], task="task")
        [lost] = talks.hold([done] * 4, task="absent")
    used("agent programs")
    used("bubblewrap")
    assert right.finish_reason == wrong.finish_reason == "stop", right.text
    assert right.counts["environment_reward"] == 1 and wrong.counts["environment_reward"] == 0
    assert "Write the number 42" in right.messages[0]["content"]
    assert "echo 42 > answer.txt" in right.messages[2]["content"], "the terminal"
    assert len(right.turns) == 3 and right.counts["overridden_calls"] == 0
    assert lost.finish_reason == LOST and "harbor" in lost.text
    with Talks(None, options, turns=1, **settings) as talks:
        [cut] = talks.hold([turn("echo 42 > answer.txt\n"), done], task="task")
    assert cut.finish_reason == "length" and cut.counts["environment_reward"] == 1, "it is scored as it is"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of random weights that reads and writes bytes."""
    tokens = tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokens.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.proof
def test_gvpo_trains_on_a_task_of_harbor(options: dict[str, Any], model: Path) -> None:
    """SFT on two trials, one right and one wrong; then three steps of GVPO with Harbor's scores."""
    settings = {"program": "harbor_program.py:run", "turns": 4, "step_timeout": 600}
    with Talks(None, options, tokens=30_000, **settings) as talks:
        trials = [
            talks.hold([turn(f"echo {number} > answer.txt\n", is_complete=True)] * 2, task="task")
            for number in (41, 42)
        ]
    demonstrations = [json.dumps({"messages": rollout.messages}) for [rollout] in trials]
    Path("demonstrations.jsonl").write_text("\n".join(demonstrations) + "\n")
    Path("task.jsonl").write_text(json.dumps({"prompt": "?", "answer": "", "task": "task"}) + "\n")
    common = {
        "model": {"path": str(model), "dtype": "float32"},
        "train": {"steps": 110, "prompts_per_step": 2, "max_tokens_per_micro_batch": 8192},
        "optimizer": {"lr": 3e-3, "warmup_steps": 0},
    }
    sft = {
        **common,
        "output_dir": "sft",
        "algorithm": "sft",
        "data": {"train": {"path": "demonstrations.jsonl"}, "max_prompt_tokens": 8192},
    }
    gvpo = {
        **common,
        "output_dir": "gvpo",
        "algorithm": "gvpo",
        "optimizer": {"lr": 3e-4, "warmup_steps": 0},
        "model": {"path": "sft/hf", "dtype": "float32"},
        "data": {"train": {"path": "task.jsonl"}},
        "rollout": {
            "n": 4,
            "temperature": 0.5,  # which of the two numbers stays open; all else is certain
            "max_tokens": 16_000,
            "conversation": {**settings, "options": {**options, "turns": 4}, "turn_tokens": 300},
        },
        "rewards": {"components": [{"name": "environment"}]},
        "train": {"steps": 3, "prompts_per_step": 1, "batch_epochs": 2, "max_tokens_per_micro_batch": 32_768},
    }
    for run in (sft, gvpo):
        file = Path(f"{run['output_dir']}.yaml")
        file.write_text(json.dumps(run))
        fit(load_config([file]))
    used("agent programs")
    used("bubblewrap")
    steps = [step for step in records(Path("gvpo")) if step["step"]]
    assert len(steps) == 3
    for step in steps:
        assert step["env/lost"] == 0 and step["env/turns"] >= 1
        assert 0 <= step["reward/mean"] <= 1
        assert step["reward/mean"] == pytest.approx(step["env/environment_reward"])
    assert any(step["train/grad_norm"] > 0 for step in steps), "some trials were right and others wrong"
