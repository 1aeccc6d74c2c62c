"""Parsers read a policy's calls of tools, and say what is wrong with those that cannot be read."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.conversations.chat import answer_of
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.data.tool_calls import PARSERS, ToolCall, parser_of
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.workers.tools import Tools, tool_message


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", 'so <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', [("f", {"x": 1})]),
        ("hermes", "no call", []),
        ("json", 'It is\n```json\n{"name": "f", "arguments": {}}\n```', [("f", {})]),
        ("json", '{"type": "function", "name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})]),  # Llama 3
        ("hermes", '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', [("f", {"x": 1})]),
        ("json", '{"name": "f"}', [("f", {})]),
        ("json", "the answer is {x}", []),
        (
            "xml",
            "<function=f><parameter=x>\n[1, 2]\n</parameter><parameter=y>a b</parameter></function>",
            [("f", {"x": [1, 2], "y": "a b"})],
        ),
    ],
)
def test_parsers_read_calls(parser: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert PARSERS[parser](text) == [ToolCall(*call) for call in calls]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "import json\n"
        "def calls(text):\n"
        "    name, _, rest = text.partition(' ')\n"
        "    return [(name, json.loads(rest))] if rest else []\n"
        "def wrong(text):\n    return {'name': text}\n"
        "def double(n: int) -> int:\n"
        '    """Doubles.\n\n    Args:\n        n: A number.\n    """\n'
        "    return 2 * n\n"
    )
    return path


def test_a_parser_of_the_users_reads_calls_and_its_mistakes_are_named(file: Path) -> None:
    parse = parser_of(f"{file}:calls")
    assert parse('f {"x": 1}') == [ToolCall("f", {"x": 1})] and parse("done") == []
    [call] = parse("f {")
    assert call.problem and call.problem.startswith("the call cannot be read: JSONDecodeError")
    with pytest.raises(
        UserFunctionError, match=r"parser=.*wrong: it returned .*: want a list of \(name, arg"
    ):
        parser_of(f"{file}:wrong")("f")
    with pytest.raises(ValueError, match="has no function 'cals'; it has: calls, double, wrong"):
        parser_of(f"{file}:cals")
    with pytest.raises(ValueError, match="parser=hermse: want hermes, json, xml, or your own function as"):
        ConversationConfig(tools=("tools.py:add",), parser="hermse")


@pytest.mark.parametrize("opened", ["<think>", ""])
def test_a_call_that_was_only_thought_of_is_not_made(opened: str) -> None:
    """Servers read calls behind the thoughts, too. Some templates open the thoughts in the prompt."""
    call = '{"name": "f", "arguments": {"x": 1}}'
    thought = f"{opened}I could <tool_call>{call}</tool_call> or <function=g></function> ...</think>\n\n"
    assert [PARSERS[name](thought + "It is 5.") for name in PARSERS] == [[], [], []]
    hermes = f"{thought}so <tool_call>{call}</tool_call>"
    made = {
        "hermes": hermes,
        "json": thought + call,
        "xml": f"{thought}<function=f><parameter=x>1</parameter></function>",
    }
    assert all(PARSERS[name](text) == [ToolCall("f", {"x": 1})] for name, text in made.items())
    message, reason = answer_of(hermes, "hermes", True, 7)
    assert (message["content"], reason, len(message["tool_calls"])) == (f"{thought}so", "tool_calls", 1)


def test_calls_have_the_ids_that_the_policy_writes() -> None:
    """Mistral's models do, in nine characters, and its templates want the id with the answer."""
    call = '{"name": "f", "arguments": {}, "id": "%s"}'
    numbers = [PARSERS["json"](call % number)[0].id for number in ("Ab1Cd2Ef3", "7")]
    assert numbers == ["Ab1Cd2Ef3", None]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>{"),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("json", '{"name": 1}'),
        ("json", '{"name": "f", "args": {"x": 1}}'),
        ("json", "[" * 100_000),
        ("xml", "<function=f>"),
    ],
)
def test_parsers_say_what_is_wrong_with_a_call(parser: str, text: str) -> None:
    [call] = PARSERS[parser](text)
    assert call.problem


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>" * 8000),
        ("xml", "<function=f>" * 8000),
        ("xml", f"<function=f>{'<parameter=x>' * 8000}</function>"),
    ],
)
def test_beginnings_without_an_end_are_read_in_no_time(parser: str, text: str) -> None:
    """A policy that repeats one token to its limit held up all conversations for a minute."""
    begin = time.process_time()
    assert len(PARSERS[parser](text)) == 1
    assert time.process_time() - begin < 1


def test_tools_and_programs_use_a_parser_of_the_users(file: Path) -> None:
    tools = Tools([f"{file}:double"], f"{file}:calls", {})
    reply = asyncio.run(tools.step('double {"n": 21}'))
    assert reply.says == [tool_message("double", "42")] and reply.counts == {
        "tool_calls": 1,
        "tool_errors": 0,
    }
    wrong = asyncio.run(tools.step("double {"))
    assert wrong.counts["tool_errors"] == 1 and "JSONDecodeError" in str(wrong.says)
    assert asyncio.run(tools.step("42")).says is None
    message, reason = answer_of('double {"n": 21}', f"{file}:calls", True, 7)
    assert reason == "tool_calls" and message["tool_calls"][0]["function"]["arguments"] == '{"n": 21}'
