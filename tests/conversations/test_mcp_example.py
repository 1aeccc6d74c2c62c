"""examples/mcp: its demonstrations are what the tools and the template say, and its run trains."""

from __future__ import annotations

import json
import random
import re
import runpy
import sys
from pathlib import Path

import pytest
from helpers import examples
from helpers.paths import ROOT
from helpers.suite.real_parts import used

from megatron_gvpo.data.tool_calls import PARSERS
from megatron_gvpo.groups import Prompt, Rollout

EXAMPLE = ROOT / "examples" / "mcp"


def test_demonstrations_are_conversations_with_the_server() -> None:
    task, tools = (runpy.run_path(str(EXAMPLE / name)) for name in ("make_task.py", "calculator_server.py"))
    right = runpy.run_path(str(EXAMPLE / "reward.py"))["right"]
    rng, called = random.Random(0), 0
    for _ in range(50):
        problem = task["make_problem"](rng)
        shown = problem["demonstration"]
        for turn, answer in re.findall(r"(<function=.*?)<\|end\|>\[(\d+)\]", shown):
            [call] = PARSERS["xml"](turn)
            assert tools[call.name](**call.arguments) == answer
            called += 1
        result = shown.rpartition("]")[2]
        rollout = Rollout([], [], "", "stop", messages=[{"role": "assistant", "content": result}])
        prompt = Prompt("p", (1,), problem["prompt"], problem["answer"])
        assert right(prompt, rollout) == 1.0
        assert right(Prompt("p", (1,), "", "1"), rollout) == 0.0
    assert called > 10


@pytest.mark.usefixtures("leave_the_process_group")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples.make_task("mcp", tmp_path, monkeypatch)
    server = json.dumps([{"command": [sys.executable, "examples/mcp/calculator_server.py"]}])
    examples.train("mcp", f"rollout.conversation.mcp={server}")
    used("MCP server")
