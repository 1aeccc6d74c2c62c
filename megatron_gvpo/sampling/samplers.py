"""Samplers turn prompts into scored groups of responses: from the rollout engine, or from the data set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from megatron_gvpo.algorithms.curriculum.allocation import Allocation
from megatron_gvpo.config.redaction import hide
from megatron_gvpo.config.schema import ConfigError, SamplingConfig
from megatron_gvpo.data.tracker import SuccessTracker
from megatron_gvpo.groups import Group, Prompt, Rollout, demonstrated
from megatron_gvpo.observe import PhaseTimer
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.rewards.served.scoring import ServedRewards
from megatron_gvpo.rollout.request import RolloutError, derived_seed
from megatron_gvpo.runtime.collectives import all_gather_msgpack, first_problem
from megatron_gvpo.sampling.engine import OnWait, RolloutEngine
from megatron_gvpo.sampling.outages import Outages

log = logging.getLogger(__name__)


class Sampler(Protocol):
    """Every rank calls it with the same arguments, and gets the same groups."""

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        """Ask for a group of each prompt; returns a ticket at once."""

    def collect(self, ticket: Any, on_wait: OnWait = None) -> list[Group]:
        """The ticket's groups, in prompt order; an engine calls `on_wait` while it waits."""


class EngineSampler:
    """Samples `n` responses to each prompt with the engine, and scores them with the rewards.

    `shares(prompts)` gives the number of responses to each prompt of a batch, where the numbers differ.
    `outages` takes out conversations that were lost, and so perhaps a prompt's group; `unscored` those that
    a reward model or a judge could not score.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: RewardPool,
        timer: PhaseTimer,
        n: int,
        sampling: SamplingConfig,
        shares: Callable[[Sequence[Prompt]], list[int]] | None = None,
        outages: Outages | None = None,
        served: ServedRewards | None = None,
        unscored: Outages | None = None,
    ) -> None:
        self._engine, self._rewards, self._timer = engine, rewards, timer
        self._outages, self._served, self._unscored = outages, served, unscored
        self._n, self._sampling, self._shares = n, sampling, shares

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        shares = [self._n] * len(prompts) if self._shares is None else self._shares(prompts)
        tickets = []
        for i, n in enumerate(sorted(set(shares))):
            places = [p for p, share in enumerate(shares) if share == n]
            of_share = seed if i == 0 else derived_seed(seed, n)
            chosen = [prompts[p] for p in places]
            tickets.append((places, self._engine.submit(chosen, n, self._sampling, of_share)))
        return tickets

    def collect(self, ticket: Any, on_wait: OnWait = None) -> list[Group]:
        found: dict[int, Group] = {}
        with self._timer.phase("rollout"):
            for places, asked in ticket:
                found |= dict(zip(places, self._engine.collect(asked, on_wait), strict=True))
        groups = [found[p] for p in range(len(found))]
        if self._outages is not None:
            groups = self._outages.taken_out(groups)
        with self._timer.phase("reward"):
            self.score(groups, on_wait)
        return groups if self._unscored is None else self._unscored.taken_out(groups)

    def score(self, groups: list[Group], on_wait: OnWait = None) -> None:
        """Fill in the rewards, of functions and of models on servers.

        Raises RolloutError, on all ranks, if a rank cannot replace a reward worker that is gone or a
        reward model's server does not fit, and for a count of conversations that none has.
        """
        if self._served is None:
            self._score(groups)
        else:
            self._served.score(groups, lambda: self._score(groups), on_wait)

    def _score(self, groups: list[Group]) -> None:
        """The rewards of functions: each rank scores every world-size-th group, then they exchange them."""
        rank, world = dist.get_rank(), dist.get_world_size()
        problem = None
        try:
            self._rewards.check(groups)
            self._rewards.score(groups[rank::world])
        except ConfigError as error:
            problem = str(error)
        if (said := first_problem(problem)) is not None:
            raise RolloutError(said)
        if world > 1:
            mine = [[_verdict(r) for r in group.rollouts] for group in groups[rank::world]]
            for source, scored in enumerate(all_gather_msgpack(mine)):
                for group, rewards in zip(groups[source::world], scored, strict=True):
                    for rollout, verdict in zip(group.rollouts, rewards, strict=True):
                        rollout.rewards, rollout.reward, rollout.reward_errors = verdict
        for warning in self._rewards.warnings(groups):
            if rank == 0:
                log.warning(hide(warning))


def _verdict(rollout: Rollout) -> tuple[dict[str, float], float, dict[str, str]]:
    return rollout.rewards, rollout.reward, rollout.reward_errors


class DatasetSampler:
    """Gives each prompt its demonstration as the only response, for supervised fine-tuning."""

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        return prompts

    def collect(self, ticket: Any, on_wait: OnWait = None) -> list[Group]:
        return [Group(prompt, [demonstrated(prompt, 1.0, "policy", 0)]) for prompt in ticket]


class FileSampler:
    """Gives each prompt the responses that the data set has, with their rewards, for offline training."""

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        return prompts

    def collect(self, ticket: Any, on_wait: OnWait = None) -> list[Group]:
        return [
            Group(
                prompt,
                [
                    Rollout(list(r.token_ids), [], r.text, "stop", -1, reward=r.reward, source="file")
                    for r in prompt.responses
                ],
            )
            for prompt in ticket
        ]


def responses_of(allocation: Allocation, tracker: SuccessTracker, n: int) -> Callable[..., list[int]]:
    """A function that gives the number of responses to each prompt of a batch."""

    def shares(prompts: Sequence[Prompt]) -> list[int]:
        known = [tracker.known(prompt) for prompt in prompts]
        return allocation.shares([None if record is None else record.success for record in known], n)

    return shares
