"""examples/agent_program: its files fit together, and its run trains."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from paths import ROOT
from suite.real_parts import used

from megatron_gvpo import cli
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.observe import read_metrics

EXAMPLE = ROOT / "examples" / "agent_program"


@pytest.mark.parametrize(("said", "answer"), [("47*86", "4042"), ("4-12", "-8"), ("4/2", "E"), ("", "E")])
def test_the_calculator_answers(said: str, answer: str) -> None:
    assert runpy.run_path(str(EXAMPLE / "agent.py"))["calculate"](said) == answer


@pytest.mark.usefixtures("leave_the_process_group")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["make_task.py", "--out", "runs/agent_program/task"])
    runpy.run_path(str(EXAMPLE / "make_task.py"), run_name="__main__")
    _shows_the_template_what_demonstrations_have(Path("runs/agent_program/task"))
    few = ("train.prompts_per_step=4", "data.train.limit=64", "logging.progress=off")
    cpu = "examples/cpu.yaml"
    sft = ("train", "examples/agent_program/sft.yaml", cpu, *few, "train.steps=2", "optimizer.warmup_steps=1")
    assert cli.main(list(sft)) == 0
    own = ("train.steps=2", "data.eval.limit=4", "optimizer.warmup_steps=1", "checkpoint.export_hf=false")
    own = (*own, "rollout.conversation.step_timeout=200")
    gvpo = ("train", "--overwrite", "examples/agent_program/gvpo.yaml", cpu, *few, *own)
    assert cli.main(list(gvpo)) == 0
    used("agent programs")
    first, *steps = read_metrics(Path("runs/agent_program/metrics.jsonl"))
    assert first["eval/pass@1"] <= 1 and len(steps) == 2
    assert all(step["env/turns"] >= 1 and step["env/lost"] == 0 for step in steps)


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
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    before = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert len(parts) == 3 and whole == before + record["demonstration"] + "<|end|>"
    calls = tokenizer(record["demonstration"])["input_ids"].count(
        tokenizer.convert_tokens_to_ids('"}}</tool_call>')
    )
    assert calls == 3, "a token each"
