"""Functions as tools in real worker processes: their answers, their mistakes and the policy's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from test_environments import SECONDS, Harness

from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import LOST, Prompt
from megatron_gvpo.huggingface.tokenizer import end_token_id, load_tokenizer
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.workers.tools import _call_function


@pytest.fixture(scope="module")
def material(task: Path) -> Task:
    """The tiny task's tokenizer: one token a character."""
    tokenizer = load_tokenizer(str(task / "model"))
    return Task(tokenizer, (end_token_id(tokenizer),), [], [])


TOOLS = '''
import time

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def slow(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "done"
'''


def test_tools_answer_calls_and_tell_the_policy_of_its_mistakes(material: Task, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    specs = (f"{tmp_path}/tools.py:add", f"{tmp_path}/tools.py:slow")
    config = ConversationConfig(tools=specs, parser="json", turns=9, step_timeout=SECONDS)
    chatty = Task(material.tokenizer, material.end_token_ids, [], [], chat=False)
    turns = [
        '{"name": "add", "arguments": {"a": 2, "b": 3}}',
        '[{"name": "add", "arguments": {"a": 2}}, {"name": "sub"}]',
        '{"name": "add", "arguments": {"a": 2, "b": "x"}}',
        '{"name": "add"',
        '{"name": "slow", "arguments": {"seconds": 30}}',
        '{"name": "slow", "arguments": {"seconds": 0}}',
        "5",
    ]

    with Harness(chatty, config) as harness:
        template = harness.conversations._template
        texts = iter(turns)  # the tiny tokenizer knows no letters
        template.text = lambda ids: next(texts)
        [[rollout]] = harness.hold([Prompt("p", (5,), "?")], ["1"] * 9)
    answers = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert answers[0] == "5"
    assert answers[1].startswith("Error: add: missing a required argument: 'b'")
    assert answers[2] == "Error: there is no tool 'sub'; there are: add, slow"
    assert answers[3].startswith("Error: TypeError") and answers[4].startswith("Error: the call is not JSON")
    assert answers[5:] == [f"Error: it took longer than {SECONDS:g} seconds", "done"]
    assert rollout.finish_reason == "stop"
    assert (rollout.counts["tool_calls"], rollout.counts["tool_errors"]) == (7.0, 5.0)


SEARCH = '''
import pathlib
from megatron_gvpo.conversations import Outage

def search(mark: str) -> str:
    """Searches, once the index is up.

    Args:
        mark: A file; where there is none, it is made, and the index is down.
    """
    if pathlib.Path(mark).exists():
        return "found"
    if mark != "never":
        pathlib.Path(mark).touch()
    raise Outage("the index is down")
'''


@pytest.mark.parametrize("again", [True, False])
def test_an_outage_behind_a_tool_is_not_the_policys_doing(
    material: Task, tmp_path: Path, again: bool
) -> None:
    (tmp_path / "search.py").write_text(SEARCH)
    mark = f"{tmp_path}/mark" if again else "never"
    texts = iter([json.dumps({"name": "search", "arguments": {"mark": mark}}), "done"])
    config = ConversationConfig(tools=(f"{tmp_path}/search.py:search",), parser="json", turns=3)
    with Harness(material, config) as harness:
        harness.conversations._template.text = lambda ids: next(texts)
        [[rollout]] = harness.hold([Prompt("p", (5,), "?")], ["1"] * 3)
    if again:
        assert rollout.finish_reason == "stop" and rollout.messages[1]["content"] == "found"
    else:
        reason = "Outage: the index is down (search.py, line 15)"
        assert (rollout.finish_reason, rollout.text) == (LOST, reason)


READS = '''
def read(pages: int) -> list[str]:
    """Reads pages.

    Args:
        pages: How many.
    """
    return ["页"] * pages
'''


@pytest.mark.parametrize(("pages", "unit"), [(2000, "tokens"), (30_000, "characters")])
def test_only_the_answer_that_is_too_long_is_left_out(
    material: Task, tmp_path: Path, pages: int, unit: str
) -> None:
    """With it went the answers of all other calls of the turn. Every text is shown as it is."""
    (tmp_path / "reads.py").write_text(READS)
    calls = [{"name": "read", "arguments": {"pages": pages}} for pages in (1, pages, 2)]
    texts = iter([json.dumps(calls), "done"])
    own = {"tools": (f"{tmp_path}/reads.py:read",), "observation_tokens": 200}
    with Harness(material, ConversationConfig(**own, parser="json", turns=3)) as harness:
        harness.conversations._template.text = lambda ids: next(texts)
        [[rollout]] = harness.hold([Prompt("p", (5,), "?")], ["1"] * 3, max_tokens=500)
    answers = [message for message in rollout.messages if message["role"] == "tool"]
    assert [answer["tool_call_id"] for answer in answers] == ["000000000", "000000001", "000000002"]
    assert answers[0]["content"] == '["页"]' and answers[2]["content"] == '["页", "页"]'
    assert answers[1]["content"].endswith(f" {unit}: too long to be shown]")
    assert rollout.counts["observations_dropped"] == 1


def test_the_policy_is_told_of_an_error_without_a_text() -> None:
    """Such an error of a tool was taken for a failure of the environment, and the conversation was lost."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    def tool() -> None:
        raise MuteError

    assert asyncio.run(_call_function(tool, {})) == ("Error: MuteError: (its message cannot be shown)", False)


LEAVES = '''
import gc, sys, time
from megatron_gvpo.workers.tools import Tools

def leaves() -> str:
    """Leaves."""
    sys.exit(3)

def environments() -> int:
    """Counts the conversations that this process knows."""
    time.sleep(0.02)
    return sum(isinstance(value, Tools) for value in gc.get_objects())
'''


def test_a_tool_may_not_end_its_process_and_workers_forget_conversations(
    material: Task, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Calls go to whichever worker is free, so that several know a conversation."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    specs = tuple(f"{tmp_path}/leaves.py:{name}" for name in ("leaves", "environments"))
    config = ConversationConfig(tools=specs, parser="json", turns=3, workers=2)
    with Harness(material, config) as harness:
        harness.conversations._template.text = lambda ids: '[{"name": "leaves"}, {"name": "environments"}]'
        for _ in range(4):
            groups = harness.hold([Prompt("p", (5,), "?")] * 6, ["1"] * 3)
    answers = [[m["content"] for m in r.messages if m["role"] == "tool"] for [r] in groups]
    assert all(len(texts) == 4 and texts[::2] == ["Error: SystemExit: 3"] * 2 for texts in answers)
    assert max(int(text) for texts in answers for text in texts[1::2]) <= 12, (
        "of this round and the one before"
    )
    shown = capfd.readouterr().err
    assert "[tools] leaves: SystemExit: 3 (leaves.py, line 7): the policy is told, and this is shown" in shown
    assert shown.count("SystemExit") <= 2, "once in each process"
