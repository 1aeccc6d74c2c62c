"""Prompts to scored groups of responses: from the rollout engine, or from the data set (SFT)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist

from megatron_gvpo.config import SamplingConfig
from megatron_gvpo.data.order import PromptOrder
from megatron_gvpo.exchange import all_gather_msgpack
from megatron_gvpo.observe import PhaseTimer
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.rollout.collect import Rollouts
from megatron_gvpo.types import Group, Prompt, Rollout


class Sampler(Protocol):
    """Every rank calls it with the same prompts and gets the same groups."""

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        """Ask for groups; returns a ticket, before they are there."""

    def collect(self, ticket: Any) -> list[Group]: ...


class EngineSampler:
    """`n` responses of the engine's policy to each prompt, with their rewards."""

    def __init__(
        self, rollouts: Rollouts, rewards: RewardPool, timer: PhaseTimer, n: int, sampling: SamplingConfig
    ) -> None:
        self._rollouts, self._rewards, self._timer = rollouts, rewards, timer
        self._n, self._sampling = n, sampling

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        return self._rollouts.submit(prompts, self._n, self._sampling, seed)

    def collect(self, ticket: Any) -> list[Group]:
        with self._timer.phase("rollout"):
            groups = self._rollouts.collect(ticket)
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

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        return prompts

    def collect(self, ticket: Any) -> list[Group]:
        return [Group(prompt, [_demonstration(prompt)]) for prompt in ticket]


class BatchQueue:
    """Batches of `size` prompts' groups in the order of the data, asked for before they are needed."""

    def __init__(self, order: PromptOrder, prompts: Sequence[Prompt], sampler: Sampler, size: int) -> None:
        self._order, self._prompts, self._sampler, self._size = order, prompts, sampler, size
        self._asked: deque[tuple[dict[str, Any], Any]] = deque()  # the order's state before it, ticket

    def ask(self, count: int) -> None:
        """Have `count` batches under way or ready."""
        while len(self._asked) < count:
            before, seed = self._order.state_dict(), self._order.seed_for_next()
            prompts = [self._prompts[i] for i in self._order.take(self._size)]
            self._asked.append((before, self._sampler.submit(prompts, seed)))

    def collect(self) -> list[Group]:
        """The groups of the oldest batch that was asked for."""
        return self._sampler.collect(self._asked.popleft()[1])

    def state_dict(self) -> dict[str, Any]:
        """Where to begin anew: batches that were asked for and not collected are asked for again."""
        return self._asked[0][0] if self._asked else self._order.state_dict()


def _demonstration(prompt: Prompt) -> Rollout:
    assert prompt.demonstration is not None, "load_prompts guarantees demonstrations for this sampler"
    return Rollout(list(prompt.demonstration), logprobs=[], text="", finish_reason="stop", reward=1.0)
