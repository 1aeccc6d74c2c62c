"""examples/agent_program: its files fit together, and its run trains."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from helpers import examples
from helpers.paths import ROOT
from helpers.suite.real_parts import used

from megatron_gvpo.huggingface.tokenizer import load_tokenizer

EXAMPLE = ROOT / "examples" / "agent_program"


@pytest.mark.parametrize(
    ("expression", "answer"), [("47*86", "4042"), ("4-12", "-8"), ("4/2", "E"), ("", "E")]
)
def test_the_calculator_answers(expression: str, answer: str) -> None:
    assert runpy.run_path(str(EXAMPLE / "agent.py"))["calculate"](expression) == answer


@pytest.mark.usefixtures("leave_the_process_group")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = examples.make_task("agent_program", tmp_path, monkeypatch)
    _shows_the_template_what_demonstrations_have(task)
    examples.train("agent_program", "rollout.conversation.step_timeout=200", prompts=4)
    used("agent programs")


def _shows_the_template_what_demonstrations_have(task: Path) -> None:
    """A demonstration's tokens are those of the chat that the agent would have held."""
    tokenizer = load_tokenizer(str(task / "model"))
    lines = (task / "data" / "train.jsonl").read_text().splitlines()
    record = next(r for r in map(json.loads, lines) if "calculate" in r["demonstration"])
    chat = [{"role": "user", "content": record["prompt"]}]
    parts = record["demonstration"].split('"expression": "')[1:]
    for part in parts:
        expression, _, rest = part.partition('"')
        function = {"name": "calculate", "arguments": {"expression": expression}}
        chat.append({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
        chat.append({"role": "tool", "content": rest.split("<|tool|>")[1].split("<|end|>")[0]})
    chat.append({"role": "assistant", "content": record["answer"]})
    chat_text = tokenizer.apply_chat_template(chat, tokenize=False)
    before = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert len(parts) == 3 and chat_text == before + record["demonstration"] + "<|end|>"
    calls = tokenizer(record["demonstration"])["input_ids"].count(
        tokenizer.convert_tokens_to_ids('"}}</tool_call>')
    )
    assert calls == 3, "a token each"
