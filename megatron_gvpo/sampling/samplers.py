"""Samplers turn prompts into scored groups of responses: from the rollout engine, or from the data set."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch.distributed as dist

from megatron_gvpo.algorithms.curriculum.allocation import Allocation
from megatron_gvpo.core.collectives import all_gather_msgpack, first_problem
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

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config
    from megatron_gvpo.types import TrainBatch


# Notices batches from which nothing can be learned, and ends a run with too many of them in a row.

SHAPED = "shaped"  # the kind of batches of which shapers leave nothing


class EmptyBatches:
    """Warns of the first batch of each kind that teaches nothing; train.max_empty_batches end the run.

    A batch teaches nothing where shapers leave none of its groups, where the loss has no signal in any group,
    or where a component of the reward failed for every response. Every rank has the same groups, so all come
    to the same result.
    """

    def __init__(self, config: Config) -> None:
        self._loss, self._limit = config.algorithm.loss, config.train.max_empty_batches
        self._taught = config.algorithm.needs_teacher  # who teaches where rewards do not, too
        self._weights = {c.name: c.weight for c in config.rewards.components}
        self._max_tokens = config.rollout.max_tokens
        self._in_a_row = Counter[str]()  # batches, by what is wrong with them
        self._said: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting. A count that ended the run starts again: its cause may be mended now."""
        counts: dict[str, int] = state.get("in_a_row", {})
        self._in_a_row.update({kind: n for kind, n in counts.items() if n + 1 < self._limit})

    def check(self, step: int, groups: Sequence[Group], mini_batches: Sequence[TrainBatch]) -> list[str]:
        """Returns warnings about the batch that a step trains on. Raises RolloutError at the limit."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        sampled = [rollout for rollout in rollouts if rollout.source == "policy"]
        found = self._failed(sampled)
        if not self._taught and not any(self._loss.has_signal(rows) for rows in mini_batches):
            found["signal"] = lambda: self._no_signal(rollouts, mini_batches)
        said = self._count(step, found, self._in_a_row.keys() - {SHAPED})
        cut = bool(sampled) and all(rollout.finish_reason == "length" for rollout in sampled)
        if cut and self._first("cut"):
            limit = f"rollout.max_tokens={self._max_tokens}"
            said.append(
                f"step {step}: every conversation ended at a limit, {limit} or one of rollout.conversation "
                "(turns, turn_tokens, rollout_timeout): raise it, or see that conversations can end before"
                if any(rollout.turns for rollout in sampled)
                else f"step {step}: every response was cut off at {limit}: raise it, or see that the model "
                "knows its end token"
            )
        return said

    def check_shaped(
        self, step: int, groups: Sequence[Group], left: Sequence[Group], dropped: Mapping[str, int]
    ) -> list[str]:
        """Returns warnings about groups that went through the shapers. Raises RolloutError at the limit.

        `dropped`: the number of groups, by the shaper.
        """

        def sentence() -> str:
            rewards = [reward for group in groups for reward in group.rewards]
            by = ", ".join(f"{name} dropped {count}" for name, count in dropped.items())
            return (
                f"nothing is left to train on: {by} groups, whose rewards were from {min(rewards):g} to "
                f"{max(rewards):g}. If these are not what they should be, see rewards.components; otherwise "
                "loosen these shapers, take other prompts or a larger rollout.n"
            )

        return self._count(step, {} if left else {SHAPED: sentence}, {SHAPED})

    def _count(self, step: int, found: Mapping[str, Callable[[], str]], looked_for: Set[str]) -> list[str]:
        """Count what was found in a batch, and forget what was looked for and not found."""
        for kind in looked_for - found.keys():
            self._in_a_row.pop(kind, None)
        self._in_a_row.update(found.keys())
        for kind, text in found.items():
            if (count := self._in_a_row[kind]) >= self._limit:
                raise RolloutError(
                    f"step {step}: {text()}. It has been so for {count} batches in a row, of which nothing "
                    "can be learned; train.max_empty_batches sets how many there may be"
                )
        limit = f"the run ends after {self._limit} such batches in a row (train.max_empty_batches)"
        return [f"step {step}: {text()}; {limit}" for kind, text in found.items() if self._first(kind)]

    def _first(self, kind: str) -> bool:
        """True when the run meets this kind for the first time."""
        new = kind not in self._said
        self._said.add(kind)
        return new

    def _failed(self, sampled: Sequence[Rollout]) -> dict[str, Callable[[], str]]:
        """The components that count and that failed for every response, each with a sentence about it."""

        def sentence(name: str) -> str:
            [(commonest, _)] = Counter(r.reward_errors[name] for r in sampled).most_common(1)
            return f"the reward {name} failed for all {len(sampled)} responses of the batch: {commonest}"

        return {
            f"reward {name}": lambda name=name: sentence(name)  # type: ignore[misc]
            for name, weight in self._weights.items()
            if weight and sampled and all(name in rollout.reward_errors for rollout in sampled)
        }

    def _no_signal(self, rollouts: Sequence[Rollout], mini_batches: Sequence[TrainBatch]) -> str:
        if not any(len(rows) for rows in mini_batches):
            return "no response of the batch is trained: all are masked"
        rewards = [rollout.reward for rollout in rollouts]
        low, high = min(rewards), max(rewards)
        between = f"all are {low:g}" if low == high else f"they are from {low:g} to {high:g}"
        lacks = "advantages are all 0" if self._loss.signal == "advantage" else "rewards differ in no group"
        return f"the loss {self._loss.name} has no signal in the batch: its {lacks} (rewards: {between})"


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


# Takes responses that an environment or a reward failed out of their groups: an outage is no reward of 0.


class LostTo(NamedTuple):
    """A kind of outage, in messages and metrics."""

    what: str  # is lost
    cause: str
    key: str  # of the largest share, in the configuration
    metrics: str  # the prefix of their names


ENVIRONMENTS = LostTo(
    "conversations", "failures of their environment", "rollout.conversation.max_lost", "env"
)
REWARDS = LostTo("responses", "reward models or judges that gave no score", "rewards.max_lost", "reward")


class Outages:
    """Counts what batches lost to a kind of outage.

    A group that keeps fewer than two members of several is dropped. Raises RolloutError, with the commonest
    cause, for a batch that lost a larger share of its responses than `most`.
    """

    def __init__(self, most: float, kind: LostTo = ENVIRONMENTS) -> None:
        self._most, self._kind = most, kind
        self.metrics: dict[str, float] = {}  # of the last batch that was sampled
        self._told = 0.0  # the largest share that was told

    def taken_out(self, groups: Sequence[Group]) -> list[Group]:
        """The groups without the responses that were lost. Every rank has the same."""
        asked = sum(len(group.rollouts) for group in groups)
        causes = Counter(r.text for group in groups for r in group.rollouts if r.finish_reason == LOST)
        left = [
            replace(group, rollouts=[r for r in group.rollouts if r.finish_reason != LOST])
            for group in groups
        ]
        pairs = zip(groups, left, strict=True)
        kept = [small for group, small in pairs if len(small.rollouts) >= min(2, len(group.rollouts))]
        lost = causes.total() / asked
        name = self._kind.metrics
        self.metrics = {f"{name}/lost": lost, f"{name}/dropped_groups": float(len(groups) - len(kept))}
        if not causes:
            return kept
        [(cause, count)] = causes.most_common(1)
        said = (
            f"{causes.total()} of {asked} {self._kind.what} were lost to {self._kind.cause}, {count} of them "
            f"to: {cause}"
        )
        if lost > self._most or not kept:
            raise RolloutError(hide(f"{said} ({self._kind.key}={self._most:g})"))
        if lost >= 2 * self._told:
            self._told = lost
            log.warning(hide(said))
        return kept
