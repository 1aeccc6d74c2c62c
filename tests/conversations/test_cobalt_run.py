"""Cobalt through the trainer: conversations are cut, and the next turn of each beginning is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.suite.real_parts import used
from helpers.tiny_run import SHORT, KeepGroups, configure, fit, records

from megatron_gvpo.data.converters import beginnings
from megatron_gvpo.groups import Group
from megatron_gvpo.huggingface.tokenizer import load_tokenizer

# It pays for the digits of a turn, and counts the turns that it has heard.
ENVIRONMENT = """
from megatron_gvpo.conversations import Reply

class Counts:
    def reset(self, prompt, seed):
        self.heard = 0

    def step(self, response):
        self.heard += 1
        return Reply(str(self.heard), reward=len(set(response)) / 10, counts={"heard": self.heard})
"""
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
)
TALK = (
    *SHORT,
    "rollout.max_tokens=24",
    "rollout.stop_token_ids=[6,7,8,9]",
    "rewards.components=[{name: environment}]",
)


def talks(file: Path, turns: int, **more: object) -> str:
    settings = {"environment": f"{file}:Counts", "turns": turns, "turn_tokens": 6, "options": {}, **more}
    return f"rollout.conversation={json.dumps(settings)}"


def run(task: Path, out: Path, model: Path, *settings: str) -> Sequence[Group]:
    recorder = KeepGroups()
    config = configure(task, out, *TALK, f"model.path={model}", "data.max_prompt_tokens=64", *settings)
    fit(config, [recorder])
    return recorder.groups


@pytest.mark.proof
@pytest.mark.usefixtures("leave_the_process_group")
def test_cobalt_trains_the_next_turn_of_recorded_conversations(task: Path, tmp_path: Path) -> None:
    used("environment workers")
    model, environment = tmp_path / "model", tmp_path / "counts.py"
    shutil.copytree(task / "model", model)
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    environment.write_text(ENVIRONMENT)
    overrides = (talks(environment, 3), "algorithm=grpo", "train.steps=2")
    recorded = run(task, tmp_path / "recorded", model, *overrides)
    cut = [
        beginning
        for group in recorded
        for rollout in group.rollouts
        for beginning in beginnings({**group.prompt.record, "answer": "0"}, rollout)
    ]
    assert {len(beginning["earlier"]) for beginning in cut} == {0, 1, 2}
    data = tmp_path / "beginnings.jsonl"
    data.write_text("".join(json.dumps(beginning) + "\n" for beginning in cut))
    next_turn = talks(environment, 1, earlier_key="earlier")
    cobalt = ("algorithm=cobalt", f"data.train.path={data}", "data.train.demonstration_key=null")
    groups = run(task, tmp_path / "run", model, next_turn, *cobalt, "train.steps=3")
    lines = records(tmp_path / "run")[1:]
    assert len(lines) == 3 and all(line["env/turns"] == 1 and line["env/lost"] == 0 for line in lines)
    assert all(line["mismatch/kl"] < 1e-5 for line in lines), "scored in the contexts that were sampled"
    earlier = set[int]()
    for group in groups:
        history = group.prompt.record["earlier"]
        earlier.add(len(history))
        for rollout in group.rollouts:
            assert len(rollout.turns) == 1 and rollout.turns[0].begin == 0
            if rollout.turns[0].reward is not None:  # else it was cut off before the environment heard it
                assert rollout.counts["heard"] == len(history) + 1
                assert rollout.reward == rollout.turns[0].reward
    assert len(earlier) > 1
