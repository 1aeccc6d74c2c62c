"""examples/mcp: its demonstrations are what the tools and the template say, and its run trains."""

from __future__ import annotations

import json
import random
import re
import runpy
import sys
from pathlib import Path

import pytest
from paths import ROOT
from suite.real_parts import used

from megatron_gvpo import cli
from megatron_gvpo.data.tool_calls import PARSERS
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.observe import read_metrics

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
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["make_task.py", "--out", "runs/mcp/task"])
    runpy.run_path(str(EXAMPLE / "make_task.py"), run_name="__main__")
    few = ("train.prompts_per_step=8", "data.train.limit=64", "logging.progress=off")
    cpu = "examples/cpu.yaml"
    sft = ("train", "examples/mcp/sft.yaml", cpu, *few, "train.steps=2", "optimizer.warmup_steps=1")
    assert cli.main(list(sft)) == 0
    server = json.dumps([{"command": [sys.executable, "examples/mcp/calculator_server.py"]}])
    own = ("train.steps=2", "data.eval.limit=4", "optimizer.warmup_steps=1", "checkpoint.export_hf=false")
    mcp = f"rollout.conversation.mcp={server}"
    # Like run.py, which trains into a directory that holds the task and the warm start.
    assert cli.main(["train", "--overwrite", "examples/mcp/gvpo.yaml", cpu, mcp, *few, *own]) == 0
    used("MCP server")
    first, *steps = read_metrics(Path("runs/mcp/metrics.jsonl"))
    assert first["eval/pass@1"] <= 1 and len(steps) == 2
    assert all(step["env/turns"] >= 1 and step["env/lost"] == 0 for step in steps)
