"""A task of Harbor, in an environment of its own, with its agent Terminus 2, which asks the policy."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.doc_blocks import blocks
from helpers.paths import HELPERS
from helpers.programs.environments import environment_of
from helpers.servers.library_environments import Talks
from helpers.suite.real_parts import used

from megatron_gvpo.groups import LOST

TASK = {
    "instruction.md": "Write the number 42 into /app/answer.txt.",
    "environment/Dockerfile": "FROM ubuntu:24.04",
    "solution/solve.sh": "echo 42 > /app/answer.txt",
    "tests/test.sh": 'printf "%d" $(( $(cat /app/answer.txt) == 42 )) > /logs/verifier/reward.txt',
    "task.toml": "version = '1.0'\nverifier = {timeout_sec = 60.0}\nagent = {timeout_sec = 120.0}\n",
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
