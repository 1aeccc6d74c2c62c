"""Environments of other libraries through our adapters, in the real worker processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.inputs.chat_tokenizer import END, ids, tokenizer
from helpers.suite.real_parts import used

from megatron_gvpo.conversations.conversations import Conversations
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig

ADAPTERS = "megatron_gvpo.conversations.adapters"


def hold(environment: str, options: dict[str, Any], prompt: Prompt, texts: Sequence[str]) -> list[Rollout]:
    """Two conversations at once, in which the policy says these texts."""
    of = tokenizer()

    class Script:
        def __init__(self) -> None:
            self.turns = [0, 0]

        async def respond(self, conversation: int, request: Request) -> Rollout:
            text = texts[self.turns[conversation]]
            self.turns[conversation] += 1
            own = [*ids(of, text), END]
            return Rollout(own, [-0.5] * len(own), "", "stop", 0)

        def end(self, conversation: int) -> None:
            pass

    config = ConversationConfig(environment=environment, options=options, turns=20, step_timeout=200)
    with (
        Conversations(config, Task(of, (END,), [], [], chat=True)) as conversations,
        asyncio.Runner() as runner,
    ):
        used("environment workers")
        request = Request(prompt.token_ids, 2, seed=3)
        running = conversations.run_all(Script(), [prompt], [request], SamplingConfig(max_tokens=4000))
        [group] = runner.run(running)
    return group


def test_a_skyrl_gym_environment_pays_its_turns() -> None:
    record = {"extra_info": {"max_turns": 3}}
    prompt = Prompt("p", (5, 6), "What is 2+3?", answer="5", record=record)
    group = hold(
        f"{ADAPTERS}.skyrl_gym:SkyRLGym", {"env_id": "gsm8k_multi_turn"}, prompt, ["it is #### 6", "#### 5"]
    )
    for rollout in group:
        assert [turn.reward for turn in rollout.turns] == [pytest.approx(0.2 / 3), 1.0]
        assert "exact format: '#### ANSWER'" in rollout.messages[1]["content"]
        assert rollout.finish_reason == "stop"


def test_a_skyrl_gym_environment_gets_its_configuration() -> None:
    skyrl_gym = pytest.importorskip("megatron_gvpo.conversations.adapters.skyrl_gym")
    config = {"search_url": "http://127.0.0.1:9", "topk": 3, "timeout": 1, "log_requests": False}
    environment = skyrl_gym.SkyRLGym("search", config)
    record = {"reward_spec": {"ground_truth": {"target": ["Paris"]}}}
    environment.reset(Prompt("p", (5, 6), "The capital of France?", record=record), seed=0)
    assert environment.step("<answer>Paris</answer>").reward == 1.0


def test_a_skyrl_gym_environment_does_not_change_the_prompt() -> None:
    """The policy would answer the data's prompt, and the environment wait for answers to its own."""
    adapter = pytest.importorskip("megatron_gvpo.conversations.adapters.skyrl_gym")
    adapter.skyrl_gym.register(id="rlm", entry_point="skyrl_gym.envs.rlm.env:BaseRLMEnv")
    try:
        environment = adapter.SkyRLGym("rlm", {})
        with pytest.raises(ValueError, match="rlm makes a prompt of its own in place of the data's"):
            environment.reset(Prompt("p", (5, 6), "What is 2+3?", answer="5"), seed=0)
        environment.close()
    finally:
        adapter.skyrl_gym.envs.deregister("rlm")


def test_a_textarena_game_is_played_from_its_seed(tmp_path: Path) -> None:
    file = tmp_path / "games.jsonl"
    command = [sys.executable, "-m", f"{ADAPTERS}.textarena", "Mastermind-v0", str(file), "--games", "2"]
    subprocess.run(command, check=True, capture_output=True)
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["game_seed"], second["game_seed"]) == (0, 1) and "Mastermind" in first["prompt"]
    prompt = Prompt("p", (5, 6), f"user: {first['prompt'].strip()}", record=first)  # as templates write it
    assert first["prompt"].strip() != first["prompt"]
    guesses = ["[1 2 3 4]", "[4 3 2 1]", *(f"[{a} {b} 5 6]" for a in (1, 2) for b in (3, 4)), *["no"] * 9]
    once, again = hold(f"{ADAPTERS}.textarena:TextArena", {}, prompt, guesses)
    assert once.messages == again.messages and once.finish_reason == "stop" and len(once.turns) > 3
    assert once.counts["invalid_move"] == 1
    changed = Prompt("p", (5, 6), "another game", record=first)
    [lost, _] = hold(f"{ADAPTERS}.textarena:TextArena", {}, changed, guesses)
    assert lost.finish_reason == "lost" and "make the data again with this version of textarena" in lost.text


@pytest.mark.parametrize(("adapter", "package"), [("skyrl_gym", "skyrl-gym"), ("textarena", "textarena")])
def test_a_package_that_is_not_installed_is_named(
    adapter: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, adapter, None)
    monkeypatch.delitem(sys.modules, f"{ADAPTERS}.{adapter}", raising=False)
    with pytest.raises(ImportError, match=rf"{package} is not installed: .*megatron-gvpo\[{package}\]"):
        __import__(f"{ADAPTERS}.{adapter}")
