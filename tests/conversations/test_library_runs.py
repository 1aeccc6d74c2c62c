"""Three steps of GVPO in an environment of each library that runs in the workers' own processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.inputs import answering_model
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, configure, fit, records

ADAPTERS = "megatron_gvpo.conversations.adapters"


def three_steps(
    task: Path, folder: Path, answers: Sequence[str], data: Path, conversation: dict[str, Any]
) -> list[dict[str, Any]]:
    """The records of a run that begins with a model of these answers."""
    answering_model.make(folder / "model", data.read_text()[:400], answers)
    config = configure(
        task,
        folder / "run",
        *GVPO,
        *("train.steps=3", "train.prompts_per_step=2", "train.max_tokens_per_micro_batch=4096"),
        *("data.eval=null", "data.max_prompt_tokens=2000", "checkpoint.export_hf=false"),
        f"data.train={json.dumps({'path': str(data), 'demonstration_key': None})}",
        f"model.path={folder / 'model'}",
        "rollout.max_tokens=2000",
        f"rollout.conversation={json.dumps({'turn_tokens': 24, 'step_timeout': 120, **conversation})}",
        "rewards.components=[{name: environment}]",
    )
    fit(config)
    used("environment workers")
    _, *steps = records(folder / "run")
    assert len(steps) == 3
    for step in steps:
        assert step["env/lost"] == 0 and step["env/turns"] > 1
        assert step["reward/mean"] == step["env/environment_reward"]
    assert all(step["train/grad_norm"] > 0 for step in steps), "answers differ, and so do their rewards"
    return steps


def test_gvpo_trains_in_an_environment_of_skyrl_gym(task: Path, tmp_path: Path) -> None:
    """A right answer ends the conversation with 1; a wrong one of the right form is paid 0.2 / 3 a turn."""
    data = tmp_path / "data.jsonl"
    record = {"prompt": "What is 2+3?", "answer": "5", "extra_info": {"max_turns": 3}}
    data.write_text(f"{json.dumps(record)}\n" * 8)
    environment = {"environment": f"{ADAPTERS}.skyrl_gym:SkyRLGym", "options": {"env_id": "gsm8k_multi_turn"}}
    steps = three_steps(task, tmp_path, ["#### 5", "#### 6", "#### 7"], data, {"turns": 4, **environment})
    for step in steps:
        assert 0.2 <= step["reward/mean"] <= 1 + 0.4 / 3


@pytest.mark.proof  # its games have many turns
def test_gvpo_trains_in_a_game_of_textarena(task: Path, tmp_path: Path) -> None:
    """Guess the number: the second invalid guess ends a game, paid by how near the last valid one was."""
    data = tmp_path / "data.jsonl"
    command = [sys.executable, "-m", f"{ADAPTERS}.textarena", "GuessTheNumber-v0", str(data), "--games", "4"]
    subprocess.run(command, check=True, capture_output=True)
    game = {"environment": f"{ADAPTERS}.textarena:TextArena", "turns": 11}
    steps = three_steps(task, tmp_path, ["[2]", "[7]", "[15]", "[19]"], data, game)
    for step in steps:
        assert 0 < step["reward/mean"] <= 1 and step["env/invalid_move"] > 0
