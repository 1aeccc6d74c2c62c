"""Samplers turn prompts into scored groups of responses: from the rollout engine, or from the data set.

Failed responses are removed from their groups, because an outage of an environment or reward is not a reward
of 0.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple, Protocol, Self

import torch.distributed as dist

from megatron_gvpo.algorithms.curriculum.prompts import Allocation
from megatron_gvpo.core.collectives import all_gather_msgpack, all_ranks_agree, is_first_rank
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.data.order import SuccessTracker
from megatron_gvpo.groups import LOST, Group, Prompt, Rollout, demonstrated
from megatron_gvpo.observe import PhaseTimer
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.rewards.served import ServedRewards
from megatron_gvpo.sampling.engine import RolloutEngine
from megatron_gvpo.servers.request import derived_seed
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.types import OnWait

log = logging.getLogger(__name__)


class LostTo(NamedTuple):
    """A kind of outage, in messages and metrics."""

    what: str  # the name of the lost part, for messages
    cause: str
    key: str  # configuration key of the largest share that may be lost
    metrics: str  # prefix of the metrics' names


ENVIRONMENTS = LostTo(
    "conversations", "failures of their environment", "rollout.conversation.max_lost", "env"
)
REWARDS = LostTo("responses", "reward models or judges that gave no score", "rewards.max_lost", "reward")


class Outages:
    """Counts the losses of batches to a kind of outage.

    A group that keeps fewer than two members of several is dropped. Raises RolloutError, with the commonest
    cause, for a batch that lost all of its responses, or a larger share than `most`. With `most` None it
    never raises; `most` is None for the few responses that a method's members request, of which one is a
    large share.
    """

    def __init__(self, most: float | None, kind: LostTo = ENVIRONMENTS) -> None:
        self._most, self._kind = most, kind
        self.metrics: dict[str, float] = {}  # metrics of the last sampled batch
        self._reported_share = 0.0  # the largest share that was reported

    def taken_out(self, groups: Sequence[Group]) -> list[Group]:
        """The groups without the responses that were lost. Every rank has the same groups."""
        if not groups:  # an earlier kind of outage has removed all groups
            return []
        wanted = sum(len(group.rollouts) for group in groups)
        causes = Counter(r.text for group in groups for r in group.rollouts if r.finish_reason == LOST)
        smaller = [
            replace(group, rollouts=[r for r in group.rollouts if r.finish_reason != LOST])
            for group in groups
        ]
        pairs = zip(groups, smaller, strict=True)
        remaining = [small for group, small in pairs if len(small.rollouts) >= min(2, len(group.rollouts))]
        lost = causes.total() / wanted
        name = self._kind.metrics
        self.metrics = {f"{name}/lost": lost, f"{name}/dropped_groups": float(len(groups) - len(remaining))}
        if not causes:
            return remaining
        [(cause, count)] = causes.most_common(1)
        message = (
            f"{causes.total()} of {wanted} {self._kind.what} were lost to {self._kind.cause}, "
            f"{count} of them to: {cause}"
        )
        if self._most is not None and (lost > self._most or not remaining):
            raise RolloutError(hide(f"{message} ({self._kind.key}={self._most:g})"))
        if lost >= 2 * self._reported_share:
            self._reported_share = lost
            if is_first_rank():
                log.warning(hide(message))
        return remaining


@dataclass(frozen=True)
class PendingGroups[Ticket]:
    """Groups that were requested from a sampler, one for each prompt.

    `tickets`: the engine's tickets for the prompts with these indices; empty for groups of the data set.
    """

    prompts: Sequence[Prompt]
    tickets: Sequence[tuple[list[int], Ticket]] = ()

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The groups of all parts, in their order."""
        first, tickets = 0, list[tuple[list[int], Ticket]]()
        for part in parts:
            tickets += [([first + index for index in indices], ticket) for indices, ticket in part.tickets]
            first += len(part.prompts)
        return cls([prompt for part in parts for prompt in part.prompts], tickets)


class Sampler[Ticket](Protocol):
    """Turns prompts into scored groups: `EngineSampler`, `DatasetSampler` and `FileSampler`, below.

    Every rank calls it with the same arguments, and gets the same groups.
    """

    def begin(self, prompts: Sequence[Prompt], seed: int) -> PendingGroups[Ticket]:
        """Ask for a group of each prompt; returns at once."""

    def finish(self, pending: PendingGroups[Ticket]) -> list[Group]:
        """Wait for the scored groups, and return them in prompt order."""


class EngineSampler[Ticket]:
    """Samples `n` responses to each prompt with the engine, and scores them with the rewards.

    `shares(prompts)` gives the number of responses to each prompt of a batch, where the numbers differ.
    `outages` removes lost conversations, and thus perhaps a prompt's group; `unscored` removes responses that
    a reward model or a judge could not score. `heartbeat` is called on every rank at once from time to time
    during a wait; its error ends the wait.
    """

    def __init__(
        self,
        engine: RolloutEngine[Ticket],
        rewards: RewardPool,
        timer: PhaseTimer,
        n: int,
        sampling: SamplingConfig,
        shares: Callable[[Sequence[Prompt]], list[int]] | None = None,
        outages: Outages | None = None,
        served: ServedRewards | None = None,
        unscored: Outages | None = None,
        heartbeat: OnWait = None,
    ) -> None:
        self._engine, self._rewards, self._timer = engine, rewards, timer
        self._outages, self._served, self._unscored = outages, served, unscored
        self._n, self._sampling, self._shares = n, sampling, shares
        self._heartbeat = heartbeat

    def begin(self, prompts: Sequence[Prompt], seed: int) -> PendingGroups[Ticket]:
        """Ask the engine, once for each number of responses."""
        shares = [self._n] * len(prompts) if self._shares is None else self._shares(prompts)
        tickets = []
        for i, n in enumerate(sorted(set(shares))):
            indices = [index for index, share in enumerate(shares) if share == n]
            share_seed = seed if i == 0 else derived_seed(seed, n)
            chosen = [prompts[index] for index in indices]
            tickets.append((indices, self._engine.submit(chosen, n, self._sampling, share_seed)))
        return PendingGroups(prompts, tickets)

    def finish(self, pending: PendingGroups[Ticket]) -> list[Group]:
        """Return the scored groups, without responses that were lost to outages."""
        groups = self._generate(pending)
        if self._outages is not None:
            groups = self._outages.taken_out(groups)
        with self._timer.phase("reward"):
            self.score(groups)
        return groups if self._unscored is None else self._unscored.taken_out(groups)

    def wait_for(self, tickets: Sequence[Sequence[Ticket]], count: int, due: int) -> list[int]:
        """As `RolloutEngine.wait_for`: indices of `count` complete entries, the first `due` among them."""
        with self._timer.phase("rollout"):
            return self._engine.wait_for(tickets, count, due, self._heartbeat)

    def _generate(self, pending: PendingGroups[Ticket]) -> list[Group]:
        """Wait for the engine's groups."""
        indices = [index for own, _ in pending.tickets for index in own]
        with self._timer.phase("rollout"):
            groups = self._engine.collect([ticket for _, ticket in pending.tickets], self._heartbeat)
        return [group for _, group in sorted(zip(indices, groups, strict=True), key=itemgetter(0))]

    def score(self, groups: list[Group]) -> None:
        """Fill in the rewards, of functions and of models on servers.

        Raises RolloutError, on all ranks, if a rank cannot replace a reward worker that has ended, if a
        reward model's server does not fit, or if a reward reads a count that no conversation reports.
        """
        if self._served is None:
            self._score(groups)
        else:
            self._served.score(groups, lambda: self._score(groups), self._heartbeat)

    def _score(self, groups: list[Group]) -> None:
        """Fill in the rewards of functions, on every rank.

        Each rank scores every world-size-th group, then they exchange the rewards.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        with all_ranks_agree(RolloutError, ConfigError):
            self._rewards.check(groups)
            self._rewards.score(groups[rank::world])
        if world > 1:
            local = [[_verdict(r) for r in group.rollouts] for group in groups[rank::world]]
            for source, scored in enumerate(all_gather_msgpack(local)):
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

    def begin(self, prompts: Sequence[Prompt], seed: int) -> PendingGroups[None]:
        return PendingGroups(prompts)

    def finish(self, pending: PendingGroups[None]) -> list[Group]:
        return [Group(prompt, [demonstrated(prompt, 1.0, "policy", 0)]) for prompt in pending.prompts]


class FileSampler:
    """Gives each prompt the responses that the data set has, with their rewards, for offline training."""

    def begin(self, prompts: Sequence[Prompt], seed: int) -> PendingGroups[None]:
        return PendingGroups(prompts)

    def finish(self, pending: PendingGroups[None]) -> list[Group]:
        return [
            Group(
                prompt,
                [
                    Rollout(list(r.token_ids), [], r.text, "stop", -1, reward=r.reward, source="file")
                    for r in prompt.responses
                ],
            )
            for prompt in pending.prompts
        ]


def responses_of(allocation: Allocation, tracker: SuccessTracker, n: int) -> Callable[..., list[int]]:
    """A function that gives the number of responses to each prompt of a batch."""

    def shares(prompts: Sequence[Prompt]) -> list[int]:
        known = [tracker.known(prompt) for prompt in prompts]
        return allocation.shares([None if record is None else record.success for record in known], n)

    return shares
