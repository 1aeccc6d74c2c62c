"""verifiers, in an environment of its own, asks the policy through the proxy as the how-to page says."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import blocks
from inputs.chat_tokenizer import END, ids, tokenizer
from suite.real_parts import used

from megatron_gvpo.conversations.programs import Programs
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.turns import segments


class Script:
    """A policy that says one thing, and records what it was asked."""

    def __init__(self) -> None:
        self.of, self.contexts = tokenizer(), list[tuple[int, ...]]()

    async def say(self, conversation: int, request: Request) -> Rollout:
        self.contexts.append(request.prompt_ids)
        own = [*ids(self.of, "it is 42"), END]
        return Rollout(own, [-0.5] * len(own), "", "stop", 0)

    def ended(self, conversation: int) -> None:
        pass


@pytest.mark.proof
def test_a_rollout_of_verifiers_is_trained_as_it_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = blocks("docs/howto/agent_programs.md")
    install, *files = [block.text for block in page if "test_verifiers.py" in block.mark]
    for name, text in zip(("verifiers_task.py", "verifiers_program.py"), files, strict=True):
        Path(name).write_text(text)
    found = Path(sys.executable).with_name("uv")
    Path("bin").mkdir()
    Path("bin/uv").symlink_to(found if found.exists() else str(shutil.which("uv")))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    python = str(Path(sys.executable).resolve())
    subprocess.run(["bash", "-ec", install.replace("3.12", python)], check=True, timeout=1800)
    config = ConversationConfig(program="verifiers_program.py:run", turns=4, step_timeout=600)
    policy = Script()
    prompt = Prompt("p", (1, 2, 3), "", answer="42", record={"prompt": "What is 6*7?"})
    material = Task(policy.of, (END,), [], [], chat=True)
    with Programs(config, "verifiers_program.py:run", material) as programs:
        used("agent programs")
        request, sampling = Request(prompt.token_ids, 1, seed=3), SamplingConfig(max_tokens=4000)
        [[rollout]] = asyncio.run(programs.hold(policy, [prompt], [request], sampling))
    assert rollout.finish_reason == "stop" and rollout.counts["environment_reward"] == 1, rollout.text
    [segment] = segments(prompt.token_ids, rollout.token_ids, rollout.turns)
    [(place, _, _)] = segment.own
    assert [tuple(segment.ids[:place])] == policy.contexts
    assert "What is 6*7?" in policy.of.decode(segment.ids[:place])
