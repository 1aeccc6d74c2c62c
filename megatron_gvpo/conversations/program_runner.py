"""Runs agent programs for the rollouts of a batch. Each has a process, a dialogue, and a key at the proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from megatron_gvpo.conversations.converse import ConversationLimits, Responder, run_groups
from megatron_gvpo.conversations.dialogue import Dialogue
from megatron_gvpo.conversations.environments import ATTEMPTS
from megatron_gvpo.conversations.proxy import Proxy
from megatron_gvpo.core.user_functions import contents
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.groups import LOST, Prompt, Rollout
from megatron_gvpo.servers.request import Request, derived_seed
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.workers import programs as handler
from megatron_gvpo.workers.messages import CallResult, Endpoint, Function, RunProgram, WireError, prompt_bytes
from megatron_gvpo.workers.output import Printout
from megatron_gvpo.workers.process import AsyncWorkerProcess, CallFailed

if TYPE_CHECKING:
    from megatron_gvpo.data.task import Task

_TEMPLATES = 200  # limit for cached templates, one for each set of tools
_APART = 16  # the most processes that start programs whose starter has ended
_BEGIN = 0.25  # seconds after which the next program may start, if a program has not called the policy


class ProgramRunner:
    """Runs the configured program (see `conversations.Conversations`). A context manager."""

    def __init__(self, config: ConversationConfig, spec: str, task: Task) -> None:
        self._config, self._spec, self._task = config, spec, task
        self._templates = {"": Template(task.tokenizer, task.end_token_ids, task.chat)}
        self._longest_token = max(map(len, task.tokenizer.get_vocab()))
        self._starters = [Starter(config, spec) for _ in range(config.workers)]
        self._apart: list[Starter] = []  # starters of programs whose first starter has ended
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Raises ConfigError if the program cannot be loaded."""
        with ExitStack() as opened:
            for starter in self._starters:
                opened.enter_context(starter)
            for starter in self._starters:
                starter.wait_ready()
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    async def run_all(
        self,
        policy: Responder,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sampling: SamplingConfig,
    ) -> list[list[Rollout]]:
        """`n` rollouts of each prompt, all at once, numbered from 0. Raises RolloutError."""
        limits = ConversationLimits.of(self._config, sampling.max_tokens)
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0) + sampling.max_tokens
        decode, vocabulary = self._templates[""].text, len(self._task.tokenizer)

        async def run(number: int, prompt: Prompt, request: Request, i: int) -> Rollout:
            def dialogue() -> Dialogue:
                respond, seed = partial(policy.respond, number), derived_seed(request.seed, i)
                return Dialogue(respond, self._template, prompt, seed, limits, self._longest_token)

            rollout = await self._rollout(proxy, dialogue, prompt, request.seed)
            policy.end(number)
            return rollout

        async with Proxy(sampling, decode, self._config.parser, vocabulary, longest) as proxy:
            rollouts = await run_groups(prompts, requests, run)
        for starter in (*self._starters, *self._apart):
            starter.end_step()
        return rollouts

    async def _rollout(
        self, proxy: Proxy, new_dialogue: Callable[[], Dialogue], prompt: Prompt, seed: int
    ) -> Rollout:
        """The rollout of one program, which is started again if it fails.

        If the process that started it has ended, any of the programs beside it may have ended that process.
        The second attempt runs apart from the others, so that a program that ends its process does not use up
        their attempts.
        """
        try:
            packed = prompt_bytes(prompt)
        except WireError as error:
            return Rollout([], [], f"its data record cannot be sent to a program: {error}", LOST)
        reason, is_suspect = "", False
        for _ in range(ATTEMPTS):
            dialogue = new_dialogue()
            endpoint = proxy.open(dialogue, seed)
            starter = self._starter_apart() if is_suspect else min(self._starters, key=lambda s: s.load)
            reward, counts = 0.0, dict[str, float]()
            try:
                result = await starter.run(packed, endpoint, dialogue)
                reward, counts = result.reward, result.counts
                reason = "it returned without an answer of the policy"
            except CallFailed as error:
                is_suspect = error.is_gone
                reason = f"the process that starts programs: {error}" if is_suspect else str(error)
                has_hit_limit = dialogue.limited and error.cause == "raised"
                if not has_hit_limit:  # otherwise a limit of turns, tokens or time ended the program
                    continue
            finally:
                await proxy.close(endpoint)
            if (rollout := dialogue.rollout(reward, counts)) is not None:
                return rollout
        return Rollout([], [], reason, LOST)

    def _starter_apart(self) -> Starter:
        """A starter for a program whose starter has ended: one that runs no other program, or the fewest.

        All of these programs run at once, because the policy may answer in rounds, which wait for every
        conversation.
        """
        if len(self._apart) < _APART and all(starter.load for starter in self._apart):
            self._apart.append(self._opened.enter_context(Starter(self._config, self._spec)))
        return min(self._apart, key=lambda starter: starter.load)

    def _template(self, tools: str) -> Template:
        """The template that shows these tools, given as JSON. Raises DataError."""
        if tools not in self._templates:
            if len(self._templates) > _TEMPLATES:  # a program may define new tools for every task
                del self._templates[[*self._templates][1]]
            task = self._task
            self._templates[tools] = Template(
                task.tokenizer, task.end_token_ids, task.chat, json.loads(tools)
            )
        return self._templates[tools]


class Starter:
    """One worker process, which starts programs, each in a process of its own. A context manager.

    It is used in one event loop. A worker that has ended is replaced when the next program starts.
    """

    def __init__(self, config: ConversationConfig, spec: str) -> None:
        self._function = Function(f"rollout.conversation.program={spec}", spec, dict(config.options))
        self._files = contents([spec, config.options])
        # Seconds after which a program that neither calls the policy nor returns is ended.
        self._idle_s = config.step_timeout
        self._printout = Printout(["program"])
        self._starting = asyncio.Lock()
        self.load = 0  # programs that run, or wait for their start

    def __enter__(self) -> Self:
        self._process = self._start_process()
        return self

    def wait_ready(self) -> None:
        """Raises ConfigError if the program cannot be loaded."""
        self._process.wait_ready()

    def __exit__(self, *error: object) -> None:
        self._process.stop()
        self._printout.end_step()

    def end_step(self) -> None:
        """Begin the next step, in which printed lines are counted from 0."""
        self._printout.end_step()

    async def run(self, prompt: bytes, endpoint: Endpoint, dialogue: Dialogue) -> CallResult:
        """The program's reward and counts. Raises CallFailed, RolloutError, and the engine's errors."""
        self.load += 1
        try:
            with ExitStack() as stack:
                async with self._starting:  # so that programs do not wait for each other's imports
                    process = await self._live_process()
                    number, result = stack.enter_context(process.call())
                    stack.callback(_give_up, process, number, result)
                    await self._send(process, RunProgram(number, prompt, endpoint))
                    await _first_call(dialogue, result)
                return await self._result(dialogue, result)
        finally:
            self.load -= 1

    def _start_process(self) -> AsyncWorkerProcess:
        return AsyncWorkerProcess(handler, self._function, self._files, self._printout)

    async def _live_process(self) -> AsyncWorkerProcess:
        """The worker process, which is started again if it has ended. Raises RolloutError."""
        if self._process.is_gone:
            await self._process.end(None)
            self._process = self._start_process()
        if not self._process.is_ready:
            await self._process.ready()
        return self._process

    async def _send(self, process: AsyncWorkerProcess, run: RunProgram) -> None:
        """Raises CallFailed if the process has ended, or does not read."""
        try:
            async with asyncio.timeout(self._idle_s):
                await process.send_when_free(run)
        except TimeoutError:
            reason = f"it took no order for {self._idle_s:g} seconds"
            await process.end(reason)
            raise CallFailed(reason, is_gone=True) from None

    async def _result(self, dialogue: Dialogue, result: asyncio.Future[CallResult]) -> CallResult:
        """The program's result. Raises CallFailed if the program hangs, and the engine's errors."""
        while not result.done():
            seconds = self._idle_s - dialogue.idle_seconds()
            if seconds <= 0 and dialogue.insists:
                raise CallFailed("it went on asking although nothing was left", "raised")
            if seconds <= 0:
                raise CallFailed(
                    f"it neither asked the policy nor returned for {self._idle_s:g} seconds "
                    "(rollout.conversation.step_timeout)"
                )
            waits: set[asyncio.Future[Any]] = {result, dialogue.failed}
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if dialogue.failed.done():
                dialogue.failed.result()
        return result.result()


async def _first_call(dialogue: Dialogue, result: asyncio.Future[CallResult]) -> None:
    """Wait until the program asks the policy, or ends, but not longer than _BEGIN."""
    dialogue.note_activity()
    first_call = asyncio.ensure_future(dialogue.first_call.wait())
    waits: set[asyncio.Future[Any]] = {first_call, result, dialogue.failed}
    await asyncio.wait(waits, timeout=_BEGIN, return_when=asyncio.FIRST_COMPLETED)
    first_call.cancel()


def _give_up(process: AsyncWorkerProcess, number: int, result: asyncio.Future[CallResult]) -> None:
    """End a program that has no result yet."""
    if not result.done():
        result.cancel()
        process.cancel([number])
