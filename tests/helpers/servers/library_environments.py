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
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from helpers.inputs.chat_tokenizer import END, ids, tokenizer
from helpers.paths import ROOT
from helpers.suite.real_parts import used
from megatron_gvpo.conversations.conversations import Conversations
from megatron_gvpo.conversations.program_runner import ProgramRunner
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
    """A policy that gives these texts, turn by turn, in every conversation, and records its prompts."""

    def __init__(self, turns: Sequence[str]) -> None:
        self.tokenizer, self._turns = tokenizer(), turns
        self.contexts: list[tuple[int, ...]] = []
        self._next: dict[int, int] = {}

    async def respond(self, conversation: int, request: Request) -> Rollout:
        turn = self._next[conversation] = self._next.get(conversation, -1) + 1
        self.contexts.append(request.prompt_ids)
        own = [*ids(self.tokenizer, self._turns[turn]), END]
        return Rollout(own, [-0.5] * len(own), "", "stop", 0)

    def end(self, conversation: int) -> None:
        pass


class Talks:
    """Conversations in the real worker processes, open for several tests.

    An environment's class or a program holds them.
    """

    def __init__(
        self,
        environment: str | None,
        options: dict[str, Any],
        program: str | None = None,
        tokens: int = 4000,
        **settings: Any,
    ) -> None:
        own = {"turns": 20, "step_timeout": 120, **settings}
        config = ConversationConfig(environment=environment, program=program, options=options, **own)
        task = Task(tokenizer(), (END,), [], [], chat=True)
        self._conversations: Conversations | ProgramRunner = (
            Conversations(config, task) if program is None else ProgramRunner(config, program, task)
        )
        self._part = "environment workers" if program is None else "agent programs"
        self._tokens = tokens
        self._runner = asyncio.Runner()

    def __enter__(self) -> Talks:
        used(self._part)
        self._conversations.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._conversations.__exit__(None, None, None)
        self._runner.close()

    def hold(self, turns: Sequence[str], n: int = 1, **record: Any) -> list[Rollout]:
        """Hold n conversations about a prompt with this record, in which the policy gives `turns`."""
        prompt = Prompt("p", (5, 6), "?", record=record)
        requests = [Request(prompt.token_ids, n, seed=3)]
        sampling = SamplingConfig(max_tokens=self._tokens)
        runs = self._conversations.run_all(Script(turns), [prompt], requests, sampling)
        [group] = self._runner.run(runs)
        return group


@contextmanager
def serving(app: web.Application) -> Iterator[str]:
    """The URL of this application, which a thread serves on loopback."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(app)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(runner.setup())
        loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        ready.set()
        loop.run_forever()
        requests = asyncio.all_tasks(loop)
        for request in requests:
            request.cancel()
        loop.run_until_complete(asyncio.gather(*requests, return_exceptions=True))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
