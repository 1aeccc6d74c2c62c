"""The conversations of a batch: what they have in common, and how those of one batch are held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megatron_gvpo.conversations.converse import Limits, Policy, converse
from megatron_gvpo.conversations.environments import Environments
from megatron_gvpo.conversations.programs import Programs
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.servers.request import Request, derived_seed
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig

if TYPE_CHECKING:
    from megatron_gvpo.data.task import Task


class Conversations:
    """Holds conversations with the configured environment. A context manager: its workers run inside."""

    def __init__(self, config: ConversationConfig, task: Task) -> None:
        self._config = config
        again = config.history == "template"
        self._template = Template(task.tokenizer, task.end_token_ids, task.chat, task.tools, again)
        self._environments = Environments(config)

    def __enter__(self) -> Self:
        """Raises ConfigError if the environment cannot be loaded."""
        self._environments.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._environments.__exit__(kind, error, trace)

    async def hold(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sampling: SamplingConfig,
    ) -> list[list[Rollout]]:
        """`n` conversations about each prompt, all at once, numbered from 0.

        The members of a group face an environment with the same seed. Raises RolloutError.
        """
        limits = Limits.of(self._config, sampling.max_tokens)
        pairs = [(p, r, i) for p, r in zip(prompts, requests, strict=True) for i in range(r.n)]

        async def one(number: int, prompt: Prompt, request: Request, i: int) -> Rollout:
            episode = self._environments.begin(prompt, request.seed)
            say, seed = partial(policy.say, number), derived_seed(request.seed, i)
            rollout = await converse(say, episode, self._template, prompt.token_ids, seed, limits)
            policy.ended(number)
            return rollout

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number, *pair)) for number, pair in enumerate(pairs)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._environments.end_step()
        found = iter(task.result() for task in tasks)
        return [[next(found) for _ in range(request.n)] for request in requests]


def conversations_of(config: ConversationConfig, task: Task) -> Conversations | Programs:
    """The holder of the configured conversations: with an environment or tools, or by programs."""
    if config.program is not None:
        return Programs(config, config.program, task)
    return Conversations(config, task)


# Conversations with an engine that answers many requests in one call: in rounds, all live ones at once.
#
# A round begins when every live conversation waits for the policy. So what is sampled together does not
# depend on how long environments take.

Generate = Callable[[Sequence[Request]], list[list[Rollout]]]


class Rounds:
    """The policy in `live` conversations that are held in one event loop."""

    def __init__(self, generate: Generate, live: int) -> None:
        self._generate, self._live = generate, live
        self._asked: list[tuple[int, Request, asyncio.Future[Rollout]]] = []

    async def say(self, conversation: int, request: Request) -> Rollout:
        """The policy's next turn, sampled once all others have asked or ended.

        A conversation may ask several times at once.
        """
        asked = conversation, request, asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._begin_round()
        try:
            return await asked[2]
        finally:
            if asked in self._asked:  # it was cancelled: nobody wants the answer any more
                self._asked.remove(asked)

    def ended(self, conversation: int) -> None:
        """The conversation needs no more turns."""
        self._live -= 1
        self._begin_round()

    def _begin_round(self) -> None:
        if not self._asked or len({conversation for conversation, _, _ in self._asked}) < self._live:
            return
        asked, self._asked = sorted(self._asked, key=lambda one: (one[0], one[1].seed)), []
        answers = self._generate([request for _, request, _ in asked])
        for (_, _, future), [rollout] in zip(asked, answers, strict=True):
            if not future.done():
                future.set_result(rollout)
