"""verifiers, in an environment of its own, asks the policy through the proxy as the how-to page says."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.doc_blocks import blocks
from helpers.inputs.chat_tokenizer import END
from helpers.library_runs import three_steps
from helpers.servers.library_environments import Script
from helpers.suite.real_parts import used

from megatron_gvpo.conversations.program_runner import ProgramRunner
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.turns import segments


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the page's files and its Python environment, and `uv` on the path."""
    monkeypatch.chdir(tmp_path)
    page = blocks("docs/howto/agent_programs.md")
    install, *files = [block.text for block in page if "test_verifiers.py" in block.mark]
    names = ("verifiers_task.py", "verifiers_program.py", "verifiers_game.py")
    for name, text in zip(names, files, strict=True):
        Path(name).write_text(text)
    own = Path(sys.executable).with_name("uv")
    Path("bin").mkdir()
    Path("bin/uv").symlink_to(own if own.exists() else str(shutil.which("uv")))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    python = str(Path(sys.executable).resolve())
    install = install.replace("3.12", python).replace("verifiers==", "'verifiers[ta]'==")
    subprocess.run(["bash", "-ec", install], check=True, timeout=1800)
    return tmp_path


@pytest.mark.proof
def test_gvpo_trains_in_a_game_of_verifiers(
    task: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hangman pays the share of the word that is known; the second invalid move in a row ends it."""
    words = folder / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("tree\nrest\nseat\n")
    monkeypatch.setenv("NLTK_DATA", str(folder / "nltk"))
    data = folder / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "Hangman-v0", "answer": "{i}"}}\n' for i in range(4)))
    program = {"program": "verifiers_program.py:run", "options": {"script": "verifiers_game.py"}, "turns": 12}
    small = ("train.prompts_per_step=1", "train.mini_batches=1", "rollout.max_tokens=3600")
    limits = ("data.max_prompt_tokens=100", "rollout.conversation.step_timeout=600")
    steps = three_steps(task, folder, ["[t]", "[e]", "[s]", "[z]"], data, program, *small, *limits)
    for step in steps:
        assert 0 < step["reward/mean"] <= 1


@pytest.mark.proof
def test_a_rollout_of_verifiers_is_trained_as_it_was_sampled(folder: Path) -> None:
    config = ConversationConfig(program="verifiers_program.py:run", turns=4, step_timeout=600)
    policy = Script(["it is 42"])
    prompt = Prompt("p", (1, 2, 3), "", answer="42", record={"prompt": "What is 6*7?"})
    material = Task(policy.tokenizer, (END,), [], [], chat=True)
    with ProgramRunner(config, "verifiers_program.py:run", material) as programs:
        used("agent programs")
        request, sampling = Request(prompt.token_ids, 1, seed=3), SamplingConfig(max_tokens=4000)
        [[rollout]] = asyncio.run(programs.run_all(policy, [prompt], [request], sampling))
    assert rollout.finish_reason == "stop" and rollout.counts["environment_reward"] == 1, rollout.text
    [segment] = segments(prompt.token_ids, rollout.token_ids, rollout.turns)
    [(position, _, _)] = segment.own
    assert [tuple(segment.ids[:position])] == policy.contexts
    assert "What is 6*7?" in policy.tokenizer.decode(segment.ids[:position])
