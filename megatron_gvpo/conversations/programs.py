"""The rollouts of a batch by programs: each a program's process, its dialogue, and a key at the proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megatron_gvpo.conversations.converse import Limits
from megatron_gvpo.conversations.dialogue import Dialogue
from megatron_gvpo.conversations.environments import ATTEMPTS
from megatron_gvpo.conversations.program_process import ProgramFailed, Starter
from megatron_gvpo.conversations.proxy import Proxy
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.groups import LOST, Prompt, Rollout
from megatron_gvpo.servers.request import Request, derived_seed
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.workers.messages import WireError, prompt_bytes

if TYPE_CHECKING:
    from megatron_gvpo.conversations.converse import Policy
    from megatron_gvpo.data.task import Task

_TEMPLATES = 200  # that show tools, at most


class Programs:
    """Runs the configured program (see `conversations.held.Conversations`). A context manager."""

    def __init__(self, config: ConversationConfig, spec: str, task: Task) -> None:
        self._config, self._task = config, task
        self._templates = {"": Template(task.tokenizer, task.end_token_ids, task.chat)}
        self._starters = [Starter(spec, config.options, config.step_timeout) for _ in range(config.workers)]
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    async def hold(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sampling: SamplingConfig,
    ) -> list[list[Rollout]]:
        """`n` rollouts of each prompt, all at once, numbered from 0. Raises RolloutError."""
        pairs = [(p, r, i) for p, r in zip(prompts, requests, strict=True) for i in range(r.n)]
        limits = Limits.of(self._config, sampling.max_tokens)
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0) + sampling.max_tokens
        text, vocabulary = self._templates[""].text, len(self._task.tokenizer)

        async def one(number: int, prompt: Prompt, request: Request, i: int) -> Rollout:
            def dialogue() -> Dialogue:
                say, seed = partial(policy.say, number), derived_seed(request.seed, i)
                return Dialogue(say, self._template, prompt, seed, limits)

            rollout = await self._rollout(proxy, dialogue, prompt, request.seed)
            policy.ended(number)
            return rollout

        async with Proxy(sampling, text, self._config.parser, vocabulary, longest) as proxy:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(number, *pair)) for number, pair in enumerate(pairs)]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        for starter in self._starters:
            starter.end_step()
        found = iter(task.result() for task in tasks)
        return [[next(found) for _ in range(request.n)] for request in requests]

    async def _rollout(
        self, proxy: Proxy, dialogue_of: Callable[[], Dialogue], prompt: Prompt, seed: int
    ) -> Rollout:
        """The rollout of one program, which is started again where it fails."""
        try:
            packed = prompt_bytes(prompt)
        except WireError as error:
            return Rollout([], [], f"its data record cannot be sent to a program: {error}", LOST)
        reason = ""
        for _ in range(ATTEMPTS):
            dialogue = dialogue_of()
            endpoint = proxy.open(dialogue, seed)
            starter = min(self._starters, key=lambda one: one.load)
            try:
                reward, counts = await starter.run(packed, endpoint, dialogue)
            except ProgramFailed as error:
                reason, reward, counts = str(error), 0.0, {}
                if not (dialogue.limited and error.raised):  # else it ended because nothing was left
                    continue
            else:
                reason = "it returned without an answer of the policy"
            finally:
                await proxy.close(endpoint)
            if (rollout := dialogue.rollout(reward, counts)) is not None:
                return rollout
        return Rollout([], [], reason, LOST)

    def _template(self, tools: str) -> Template:
        """The template that shows these tools, given as JSON. Raises DataError."""
        if tools not in self._templates:
            if len(self._templates) > _TEMPLATES:  # a program may make tools for every task
                del self._templates[[*self._templates][1]]
            task = self._task
            self._templates[tools] = Template(
                task.tokenizer, task.end_token_ids, task.chat, json.loads(tools)
            )
        return self._templates[tools]
