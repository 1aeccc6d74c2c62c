"""examples/search: its demonstrations are what the tool and the template say, and its run trains."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from paths import ROOT
from suite.real_parts import used

from megatron_gvpo import cli
from megatron_gvpo.data.tool_calls import PARSERS
from megatron_gvpo.observe import read_metrics

EXAMPLE = ROOT / "examples" / "search"


@pytest.mark.usefixtures("leave_the_process_group")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["make_task.py", "--out", "runs/search/task"])
    runpy.run_path(str(EXAMPLE / "make_task.py"), run_name="__main__")
    demonstrations_are_what_the_tool_answers(Path("runs/search/task/data/test.jsonl"))
    few = ("train.prompts_per_step=8", "data.train.limit=64", "logging.progress=off")
    cpu = "examples/cpu.yaml"
    sft = ("train", "examples/search/sft.yaml", cpu, *few, "train.steps=2", "optimizer.warmup_steps=1")
    assert cli.main(list(sft)) == 0
    own = ("train.steps=2", "data.eval.limit=4", "optimizer.warmup_steps=1", "checkpoint.export_hf=false")
    # Like run.py, which trains into a directory that holds the task and the warm start.
    assert cli.main(["train", "--overwrite", "examples/search/gvpo.yaml", cpu, *few, *own]) == 0
    used("environment workers")
    first, *steps = read_metrics(Path("runs/search/metrics.jsonl"))
    assert first["eval/pass@1"] <= 1 and len(steps) == 2
    assert all(step["env/turns"] >= 1 and step["env/lost"] == 0 for step in steps)


def demonstrations_are_what_the_tool_answers(data: Path) -> None:
    search = runpy.run_path(str(EXAMPLE / "search.py"))["search"]
    called = 0
    for problem in map(json.loads, data.read_text().splitlines()):
        *calls, result = problem["demonstration"]
        for call, page in zip(calls[::2], calls[1::2], strict=True):
            [parsed] = PARSERS["xml"](call["content"])
            assert search(**parsed.arguments) == page["content"]
            called += 1
        if calls:
            assert f" {problem['prompt'].split()[0]} {problem['answer']}" in calls[-1]["content"]
        assert result["content"] == f"{{{problem['answer']}}}"
    assert called > 50
    assert search("zzz") == "no page" and search("?") == "no words"
