"""The conversations of a batch with environments or tools, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from megatron_gvpo.conversations.converse import ConversationLimits, Responder, converse, run_groups
from megatron_gvpo.conversations.environments import Environments
from megatron_gvpo.conversations.program_runner import ProgramRunner
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.servers.request import Request, derived_seed
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig

if TYPE_CHECKING:
    from megatron_gvpo.data.task import Task


class Conversations:
    """Runs conversations with the configured environment. A context manager: its workers run inside."""

    def __init__(self, config: ConversationConfig, task: Task) -> None:
        self._config = config
        again = config.history == "template"
        self._template = Template(task.tokenizer, task.end_token_ids, task.chat, task.tools, again)
        self._environments = Environments(config)

    def __enter__(self) -> Self:
        """Raises ConfigError if the environment cannot be loaded."""
        self._environments.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._environments.__exit__(*error)

    async def run_all(
        self,
        policy: Responder,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sampling: SamplingConfig,
    ) -> list[list[Rollout]]:
        """`n` conversations about each prompt, all at once, numbered from 0.

        The members of a group face an environment with the same seed. Raises RolloutError.
        """
        limits = ConversationLimits.of(self._config, sampling.max_tokens)

        async def run(number: int, prompt: Prompt, request: Request, i: int) -> Rollout:
            episode = self._environments.begin(prompt, request.seed)
            respond, seed = partial(policy.respond, number), derived_seed(request.seed, i)
            rollout = await converse(respond, episode, self._template, prompt.token_ids, seed, limits)
            policy.end(number)
            return rollout

        rollouts = await run_groups(prompts, requests, run)
        self._environments.end_step()
        return rollouts


def conversations_of(config: ConversationConfig, task: Task) -> Conversations | ProgramRunner:
    """Return the object that runs the configured conversations: with an environment, tools or programs."""
    if config.program is not None:
        return ProgramRunner(config, config.program, task)
    return Conversations(config, task)


Generate = Callable[[Sequence[Request]], list[list[Rollout]]]


class _PendingRequest(NamedTuple):
    conversation: int
    request: Request
    response: asyncio.Future[Rollout]


class BatchedPolicy:
    """A Responder for an engine that answers many requests in one call of `generate`.

    The policy answers in rounds. A round begins when each of the `live` conversations waits for the policy.
    So which turns are sampled together does not depend on the times of the environments. All run in one event
    loop.
    """

    def __init__(self, generate: Generate, live: int) -> None:
        self._generate, self._live = generate, live
        self._pending: list[_PendingRequest] = []

    async def respond(self, conversation: int, request: Request) -> Rollout:
        """The policy's next turn, sampled once all other conversations wait for theirs or have ended.

        A conversation may make several requests at once.
        """
        pending = _PendingRequest(conversation, request, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        self._answer_if_complete()
        try:
            return await pending.response
        finally:
            if pending in self._pending:  # it was cancelled, so no caller waits for the answer
                self._pending.remove(pending)

    def end(self, conversation: int) -> None:
        """Record that the conversation needs no more turns."""
        self._live -= 1
        self._answer_if_complete()

    def _answer_if_complete(self) -> None:
        """Sample a round if every live conversation waits."""
        if not self._pending or len({pending.conversation for pending in self._pending}) < self._live:
            return
        batch = sorted(self._pending, key=lambda pending: (pending.conversation, pending.request.seed))
        self._pending = []
        rows = self._generate([pending.request for pending in batch])
        for pending, [rollout] in zip(batch, rows, strict=True):
            if not pending.response.done():
                pending.response.set_result(rollout)
