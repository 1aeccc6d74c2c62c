"""examples/search: its demonstrations are what the tool and the template say, and its run trains."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from helpers import examples
from helpers.paths import ROOT
from helpers.suite.real_parts import used

from megatron_gvpo.data.tool_calls import PARSERS

EXAMPLE = ROOT / "examples" / "search"


@pytest.mark.usefixtures("leave_the_process_group")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = examples.make_task("search", tmp_path, monkeypatch)
    demonstrations_are_what_the_tool_answers(task / "data" / "test.jsonl")
    examples.train("search")
    used("environment workers")


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
