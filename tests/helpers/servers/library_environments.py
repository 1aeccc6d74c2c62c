"""Python environments with other libraries' environments, and conversations of a scripted policy with them.

tools/environments/make_env.sh builds them once, in the user's cache. Where one cannot be built, the tests
that need it fail and say why.
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from helpers.inputs.chat_tokenizer import END, ids, tokenizer
from helpers.paths import ROOT
from helpers.suite.real_parts import used
from megatron_gvpo.conversations.conversations import Conversations
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig

BUILD_SECONDS = 1200.0


@functools.cache
def library_python(library: str) -> str:
    """The interpreter of the library's Python environment, built where it is missing."""
    script = ROOT / "tools" / "environments" / "make_env.sh"
    environment = {**os.environ, "ENVIRONMENT_PYTHON": sys.executable}
    built = subprocess.run(
        [script, library], capture_output=True, text=True, timeout=BUILD_SECONDS, env=environment
    )
    assert built.returncode == 0, f"no Python environment for {library}:\n{built.stderr[-3000:]}"
    return built.stdout.strip().splitlines()[-1]


class Script:
    """A policy that says these texts, turn by turn, in every conversation."""

    def __init__(self, turns: Sequence[str]) -> None:
        self._of, self._turns = tokenizer(), turns
        self._next: dict[int, int] = {}

    async def respond(self, conversation: int, request: Request) -> Rollout:
        turn = self._next[conversation] = self._next.get(conversation, -1) + 1
        own = [*ids(self._of, self._turns[turn]), END]
        return Rollout(own, [-0.5] * len(own), "", "stop", 0)

    def end(self, conversation: int) -> None:
        pass


class Talks:
    """Conversations in the real worker processes, open for several tests."""

    def __init__(self, environment: str, options: dict[str, Any], **settings: Any) -> None:
        config = ConversationConfig(
            environment=environment, options=options, **{"turns": 20, "step_timeout": 120, **settings}
        )
        self._conversations = Conversations(config, Task(tokenizer(), (END,), [], [], chat=True))
        self._runner = asyncio.Runner()

    def __enter__(self) -> Talks:
        used("environment workers")
        self._conversations.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._conversations.__exit__(None, None, None)
        self._runner.close()

    def hold(self, turns: Sequence[str], n: int = 1, **record: Any) -> list[Rollout]:
        """A group of n conversations about a prompt with this record, in which the policy says `turns`."""
        prompt = Prompt("p", (5, 6), "?", record=record)
        requests = [Request(prompt.token_ids, n, seed=3)]
        sampling = SamplingConfig(max_tokens=4000)
        runs = self._conversations.run_all(Script(turns), [prompt], requests, sampling)
        [group] = self._runner.run(runs)
        return group
