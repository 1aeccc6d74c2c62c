"""Three steps of GVPO in an environment of each library that runs in the workers' own processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.library_runs import three_steps

ADAPTERS = "megatron_gvpo.conversations.adapters"


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
