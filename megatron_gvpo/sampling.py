"""Prompts to scored groups of responses: from the rollout engine, or from the data set (SFT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from megatron_gvpo.config import SamplingConfig
from megatron_gvpo.exchange import all_gather_msgpack
from megatron_gvpo.observe import PhaseTimer
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.rollout.collect import generate_groups
from megatron_gvpo.rollout.engine import Engine
from megatron_gvpo.types import Group, Prompt, Rollout


class Sampler(Protocol):
    """Every rank calls it with the same prompts and gets the same groups."""

    def sample(self, prompts: Sequence[Prompt], seed: int) -> list[Group]: ...


class EngineSampler:
    """`n` responses of the engine's policy to each prompt, with their rewards."""

    def __init__(
        self, engine: Engine, rewards: RewardPool, timer: PhaseTimer, n: int, sampling: SamplingConfig
    ) -> None:
        self._engine, self._rewards, self._timer = engine, rewards, timer
        self._n, self._sampling = n, sampling

    def sample(self, prompts: Sequence[Prompt], seed: int) -> list[Group]:
        with self._timer.phase("rollout"):
            groups = generate_groups(self._engine, prompts, self._n, self._sampling, seed)
        with self._timer.phase("reward"):
            self._score(groups)
        return groups

    def _score(self, groups: list[Group]) -> None:
        """Each rank verifies every world-size-th group; then all learn all rewards."""
        rank, world = dist.get_rank(), dist.get_world_size()
        self._rewards.score(groups[rank::world])
        if world == 1:
            return
        mine = [
            [(r.rewards, r.reward, r.reward_errors) for r in group.rollouts] for group in groups[rank::world]
        ]
        for source, scored in enumerate(all_gather_msgpack(mine)):
            for group, rewards in zip(groups[source::world], scored, strict=True):
                for rollout, verdict in zip(group.rollouts, rewards, strict=True):
                    rollout.rewards, rollout.reward, rollout.reward_errors = verdict


class DatasetSampler:
    """Each prompt's demonstration as its only response: what supervised fine-tuning trains on."""

    def sample(self, prompts: Sequence[Prompt], seed: int) -> list[Group]:
        return [Group(prompt, [_demonstration(prompt)]) for prompt in prompts]


def _demonstration(prompt: Prompt) -> Rollout:
    assert prompt.demonstration is not None, "load_prompts guarantees demonstrations for this sampler"
    return Rollout(list(prompt.demonstration), logprobs=[], text="", finish_reason="stop", reward=1.0)
