"""The embedded engine: every rank holds a transformers model, and samples its share of the prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from megatron_gvpo.conversations.conversations import BatchedPolicy, Conversations, conversations_of
from megatron_gvpo.conversations.program_runner import ProgramRunner
from megatron_gvpo.core.clock import event_loop
from megatron_gvpo.core.collectives import all_gather_msgpack, all_ranks_agree
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.data.image_files import ImageError
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import LOST, Group, Prompt, Rollout
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.megatron import parallel
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.request import Request, pack, requests_for, unpack
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig, SamplingConfig
from megatron_gvpo.types import OnWait

if TYPE_CHECKING:
    from megatron_gvpo.megatron.scorer import Scorer


@dataclass(frozen=True)
class QueuedPrompts:
    """Arguments of `submit`, kept until `collect` samples."""

    prompts: Sequence[Prompt]
    n: int
    sampling: SamplingConfig
    seed: int


class EmbeddedEngine:
    """Samples in the trainer's processes, when groups are collected (see `RolloutEngine`)."""

    shares_gpus = False  # false: the engine and the trainer fit into memory together

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        output_dir: str,
        cards: ModelCards,
        task: Task,
        policy: Scorer,
    ) -> None:
        """`output_dir` is for engines that write files; this one writes none."""
        check_embedded_engine(model, cards.policy)
        self._policy = policy
        self._model = LocalModel(
            model.path,
            task.tokenizer,
            device=parallel.device(),
            dtype=getattr(torch, model.dtype),
            batch_size=rollout.batch_size,
            end_token_ids=task.end_token_ids,
            trust_remote_code=model.trust_remote_code,
        )
        talks = rollout.conversation
        self._conversations = None if talks is None else conversations_of(talks, task)
        self._opened = ExitStack()

    @property
    def version(self) -> int:
        return self._model.version

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def sync(self, version: int) -> None:
        """Copy the policy's weights into the model. Raises ValueError if the two do not fit."""
        self._model.load(self._policy.weights(on_host=False), version)

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int) -> QueuedPrompts:
        return QueuedPrompts(prompts, n, sampling, seed)

    def wait_for(
        self, tickets: Sequence[Sequence[QueuedPrompts]], count: int, due: int, on_wait: OnWait = None
    ) -> list[int]:
        raise AssertionError("rollout.over_sampling_prompts is refused: all is sampled when it is collected")

    def collect(self, tickets: Sequence[QueuedPrompts], on_wait: OnWait = None) -> list[Group]:
        """Sample now. `on_wait` is never called, because this process computes and does not wait."""
        return [group for ticket in tickets for group in self._sampled(ticket)]

    def _sampled(self, ticket: QueuedPrompts) -> list[Group]:
        if self._conversations is None:
            return generate_groups(ticket, partial(self._generate, ticket.sampling))
        return generate_groups(ticket, partial(self._converse, self._conversations, ticket.sampling))

    def _generate(
        self, sampling: SamplingConfig, _: Sequence[Prompt], requests: Sequence[Request]
    ) -> list[list[Rollout]]:
        """Sample this rank's share of the responses.

        Raises RolloutError, on all ranks, if a rank cannot read an image.
        """
        rows = list[list[Rollout]]()
        with all_ranks_agree(RolloutError, ImageError):
            rows = self._model.generate(requests, sampling)
        return rows

    def _converse(
        self,
        conversations: Conversations | ProgramRunner,
        sampling: SamplingConfig,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
    ) -> list[list[Rollout]]:
        """Run this rank's conversations in rounds, in one event loop for all steps of the run.

        Raises RolloutError, on all ranks, if a rank cannot replace a worker that has ended.
        """
        live = sum(request.n for request in requests)
        policy = BatchedPolicy(lambda requests: self._model.generate(requests, sampling), live)
        rows = list[list[Rollout]]()
        with all_ranks_agree(RolloutError):
            rows = self._loop.run(conversations.run_all(policy, prompts, requests, sampling))
        for rollout in (r for row in rows for r in row if r.finish_reason != LOST):
            rollout.text = self._model.decode(rollout.token_ids)
        return rows

    def __enter__(self) -> Self:
        """Raises ConfigError, on every rank, if the environment of conversations cannot be loaded."""
        if self._conversations is not None:
            try:
                with all_ranks_agree(ConfigError):  # a file may be missing on one node alone
                    self._opened.enter_context(self._conversations)
                    self._loop = self._opened.enter_context(asyncio.Runner(loop_factory=event_loop))
            except ConfigError:
                self._opened.close()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()
        self._model.close()


Generate = Callable[[Sequence[Prompt], Sequence[Request]], list[list[Rollout]]]


def generate_groups(ticket: QueuedPrompts, generate: Generate) -> list[Group]:
    """The ticket's groups, in prompt order, on every rank; `generate` samples this rank's share.

    Collective over the default process group where there is one: every rank holds the same weights, and
    samples a contiguous share of the prompts. Seeds belong to prompts, so the number of ranks changes results
    only through rounding.
    """
    requests = requests_for(ticket.prompts, ticket.n, ticket.seed)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = slice(rank * len(requests) // world, (rank + 1) * len(requests) // world)
    rows = generate(ticket.prompts[share], requests[share])
    if world > 1:
        rows = [row for part in all_gather_msgpack(pack(rows)) for row in unpack(part)]
    return [Group(prompt, row) for prompt, row in zip(ticket.prompts, rows, strict=True)]


# Refuses models that the embedded engine cannot sample from, before anything is loaded.

# transformers keeps the experts of this architecture as the file has them: a layer's experts in one tensor.
_WHOLE_EXPERTS = ("GptOssForCausalLM",)


def check_embedded_engine(model: ModelConfig, card: ModelCard) -> None:
    """Raises ConfigError if the run would stop at its first push or at its first prompt."""
    reason = None
    if card.experts and not any(name in _WHOLE_EXPERTS for name in card.architectures):
        reason = "experts, which its file has one by one"
    elif "linear_attention" in (card.get("layer_types") or ()) or "linear_num_value_heads" in card:
        reason = "layers with a gated delta net"
    if reason is not None:
        raise ConfigError(
            f"model.path={model.path} has {reason}, and the embedded engine cannot sample from such a "
            "model: set rollout.engine to sglang or vllm"
        )
