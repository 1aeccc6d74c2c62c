"""From prompts to groups: seeds, the sharing of requests among ranks, and the exchange of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, Protocol

import torch.distributed as dist

from megatron_gvpo.config.schema import SamplingConfig
from megatron_gvpo.runtime.collectives import all_gather_msgpack
from megatron_gvpo.sampling.engine import Engine, Request, derived_seed
from megatron_gvpo.types import Group, Prompt, Rollout


class TrainerMemory(Protocol):
    """The trainer's memory on this rank's accelerator, which a colocated engine needs while it generates."""

    def release(self, part: Literal["weights", "training"]) -> None: ...

    def restore(self, part: Literal["weights", "training"]) -> None: ...


class Rollouts(Protocol):
    """Where groups come from. Every rank calls it with the same arguments, and gets the same groups."""

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int) -> Any:
        """Ask for `n` responses to each prompt. Returns a ticket, before they are there."""

    def collect(self, ticket: Any) -> list[Group]:
        """The ticket's groups, in prompt order."""


class EmbeddedRollouts:
    """Rollouts of an engine in every rank's own process, which generates when they are collected."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int) -> Any:
        return prompts, n, sampling, seed

    def collect(self, ticket: Any) -> list[Group]:
        return generate_groups(self._engine, *ticket)


def generate_groups(
    engine: Engine, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int
) -> list[Group]:
    """`n` rollouts for each prompt, in order; every rank gets the same full list.

    Collective over the default process group where there is one: every rank holds an engine with the
    same weights, calls this with the same arguments, and generates a contiguous share of the prompts.
    Seeds belong to prompts, so the number of ranks changes results only through rounding.
    """
    requests = [Request(prompt.token_ids, n, derived_seed(seed, i)) for i, prompt in enumerate(prompts)]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = requests[rank * len(requests) // world : (rank + 1) * len(requests) // world]
    mine = engine.generate(share, sampling)
    if world > 1:
        packed = [[pack_rollout(rollout) for rollout in rollouts] for rollouts in mine]
        mine = [[Rollout(**r) for r in rollouts] for part in all_gather_msgpack(packed) for rollouts in part]
    return [Group(prompt, rollouts) for prompt, rollouts in zip(prompts, mine, strict=True)]


def pack_rollout(rollout: Rollout) -> dict[str, Any]:
    """Its fields, as the exchange between ranks takes them: `Rollout(**fields)` is the rollout again."""
    return {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
