"""The embedded engine: every rank holds a transformers model, and samples its share of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from megatron_gvpo.config.schema import Config, SamplingConfig
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Group, Prompt
from megatron_gvpo.megatron import parallel
from megatron_gvpo.rollout.request import pack, requests_for, unpack
from megatron_gvpo.runtime.collectives import all_gather_msgpack
from megatron_gvpo.sampling.engine import OnWait
from megatron_gvpo.sampling.local_model import LocalModel

if TYPE_CHECKING:
    from megatron_gvpo.megatron.scorer import Scorer


@dataclass(frozen=True)
class Ticket:
    """Arguments of `submit`, kept until `collect` samples."""

    prompts: Sequence[Prompt]
    n: int
    sampling: SamplingConfig
    seed: int


class EmbeddedEngine:
    """Samples in the trainer's processes, when groups are collected (see `RolloutEngine`)."""

    shares_gpus = False  # it fits beside the trainer

    def __init__(self, config: Config, task: Task, policy: Scorer) -> None:
        self._policy = policy
        self._model = LocalModel(
            config.model.path,
            task.tokenizer,
            device=parallel.device(),
            dtype=getattr(torch, config.model.dtype),
            batch_size=config.rollout.batch_size,
            end_token_id=task.end_token_id,
            trust_remote_code=config.model.trust_remote_code,
        )

    @property
    def version(self) -> int:
        return self._model.version

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def sync(self, version: int) -> None:
        """Copy the policy's weights into the model. Raises ValueError where the two do not fit."""
        self._model.load(self._policy.weights(on_host=False), version)

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int) -> Ticket:
        return Ticket(prompts, n, sampling, seed)

    def collect(self, ticket: Ticket, on_wait: OnWait = None) -> list[Group]:
        """Sample now. `on_wait` is never called: this process is busy, and waits for nobody."""
        return generate_groups(self._model, ticket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._model.close()


def generate_groups(model: LocalModel, ticket: Ticket) -> list[Group]:
    """The ticket's groups, in prompt order, on every rank.

    Collective over the default process group where there is one: every rank holds the same weights, and
    samples a contiguous share of the prompts. Seeds belong to prompts, so the number of ranks changes results
    only through rounding.
    """
    requests = requests_for(ticket.prompts, ticket.n, ticket.seed)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = requests[rank * len(requests) // world : (rank + 1) * len(requests) // world]
    rows = model.generate(share, ticket.sampling)
    if world > 1:
        rows = [row for part in all_gather_msgpack(pack(rows)) for row in unpack(part)]
    return [Group(prompt, row) for prompt, row in zip(ticket.prompts, rows, strict=True)]
