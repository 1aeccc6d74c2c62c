"""Reward models and judges on real servers: scores equal transformers' logits, also when servers die."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.parts_of_a_run import served_rewards_of
from helpers.servers.real_servers import engine_python
from helpers.servers.reward_models import logits, make_judge, make_reward_model
from helpers.servers.server_keys import assert_key_is_hidden, assert_key_is_wanted
from helpers.suite.real_parts import used

from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.settings.config import load_config

VERDICT = {
    "type": "object",
    "properties": {"score": {"enum": [0, 5, 10]}, "explanation": {"enum": ["too short", "well said"]}},
    "required": ["score", "explanation"],
    "additionalProperties": False,
}
FIRST = ("sglang", "qwen2", "vllm", {"json_schema": VERDICT})
SECOND = ("vllm", "llama", "sglang", {"regex": "Score: ([0-9]|10)"})
PAIRS = [
    pytest.param(*FIRST, False, id="sglang"),
    pytest.param(*FIRST, True, marks=pytest.mark.proof, id="sglang, killed"),
    pytest.param(*SECOND, True, marks=pytest.mark.proof, id="vllm, killed"),
]
# A random model that is greedy may write white space without end between the parts of a JSON object.
LOOSE = {"temperature": 1.0, "max_tokens": 400}
TEXTS = ["4", "Four.", "I add two and two, which gives four. " * 3, "", "two plus two is 4", "?!"]


def groups() -> list[Group]:
    prompts = [Prompt(f"p{i}", (5,), f"What is {i} + 2?", str(i + 2)) for i in range(3)]
    return [Group(p, [Rollout([5], [-0.5], text, "stop") for text in TEXTS]) for p in prompts]


def check(scored: list[Group], expected: list[float]) -> None:
    rollouts = [rollout for group in scored for rollout in group.rollouts]
    assert [rollout.finish_reason for rollout in rollouts] == ["stop"] * len(expected), rollouts[0].text
    assert [rollout.rewards["quality"] for rollout in rollouts] == pytest.approx(expected, abs=2e-5)
    for rollout in rollouts:
        rubric = rollout.rewards["rubric"]
        assert rubric in {n / 10 for n in range(11)} and rollout.explanations["rubric"]
        assert rollout.reward == pytest.approx(rollout.rewards["quality"] + 0.5 * rubric)


@pytest.mark.parametrize(("engine", "family", "other", "form", "kill"), PAIRS)
def test_scores_equal_the_models_logits(
    engine: str, family: str, other: str, form: dict[str, Any], kill: bool, good: Path, tmp_path: Path
):
    model = make_reward_model(tmp_path / "reward_model", family)
    servers = [{"engine": name, "python": engine_python(name)} for name in (engine, other)]
    scores = {"path": str(model), "dtype": "float32", "batch_size": 5, "servers": servers[0]}
    template = "Grade {response} as an answer to {prompt}, which is {answer}."
    judges = {"path": str(make_judge(tmp_path / "judge")), "dtype": "float32", "template": template}
    components = [
        {"name": "quality", "model": scores},
        {
            "name": "rubric",
            "weight": 0.5,
            "judge": {**judges, **LOOSE, "servers": servers[1], **form},
        },
    ]
    overrides = [f"rewards.components={json.dumps(components)}", f"output_dir={tmp_path / 'run'}"]
    chats = [
        [{"role": "user", "content": group.prompt.text}, {"role": "assistant", "content": rollout.text}]
        for group in groups()
        for rollout in group.rollouts
    ]
    expected = logits(model, chats)
    assert len({round(score, 3) for score in expected}) == len(expected)
    with served_rewards_of(load_config([good], overrides)) as served:
        first = groups()
        served.score(first, lambda: None)
        check(first, expected)
        assert served.metrics["reward/quality/failed_requests"] == 0
        for addresses in (scorer.servers._addresses for scorer in served._served):
            assert addresses.supervisor is not None and addresses.api_key is not None
            [process] = addresses.supervisor.processes
            assert_key_is_wanted(process, addresses.api_key)
            assert_key_is_hidden(process, addresses.api_key)
        if kill:
            for scorer in served._served:
                assert scorer.servers._addresses.supervisor is not None
                [process] = scorer.servers._addresses.supervisor.processes
                assert process.pid is not None
                os.killpg(process.pid, signal.SIGKILL)
            again = groups()
            served.score(again, lambda: None)
            check(again, expected)
            assert served.metrics["reward/quality/failed_requests"] > 0
    used(f"{engine} server")
    used(f"{other} server")
