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
from helpers.servers.library_environments import Script
from helpers.suite.real_parts import used

from megatron_gvpo.conversations.program_runner import ProgramRunner
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.turns import segments


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
    policy = Script(["it is 42"])
    prompt = Prompt("p", (1, 2, 3), "", answer="42", record={"prompt": "What is 6*7?"})
    material = Task(policy.tokenizer, (END,), [], [], chat=True)
    with ProgramRunner(config, "verifiers_program.py:run", material) as programs:
        used("agent programs")
        request, sampling = Request(prompt.token_ids, 1, seed=3), SamplingConfig(max_tokens=4000)
        [[rollout]] = asyncio.run(programs.run_all(policy, [prompt], [request], sampling))
    assert rollout.finish_reason == "stop" and rollout.counts["environment_reward"] == 1, rollout.text
    [segment] = segments(prompt.token_ids, rollout.token_ids, rollout.turns)
    [(place, _, _)] = segment.own
    assert [tuple(segment.ids[:place])] == policy.contexts
    assert "What is 6*7?" in policy.tokenizer.decode(segment.ids[:place])
