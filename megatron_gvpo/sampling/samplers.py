"""Prompts to scored groups of responses: of the rollout engine, or the data set's own."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.algorithms.curriculum.allocation import Allocation
from megatron_gvpo.algorithms.members.base import JoinGroups
from megatron_gvpo.algorithms.shapers.base import Shaper, rewarded
from megatron_gvpo.config.schema import ConfigError, SamplingConfig
from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.data.tracker import SuccessTracker
from megatron_gvpo.observe import PhaseTimer
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.rollout.pool import RolloutError
from megatron_gvpo.runtime.collectives import all_gather_msgpack, broadcast_msgpack, first_problem
from megatron_gvpo.runtime.user_functions import described, load_function
from megatron_gvpo.sampling.collect import Rollouts
from megatron_gvpo.sampling.engine import derived_seed
from megatron_gvpo.types import Group, Prompt, Rollout, TrainBatch

log = logging.getLogger(__name__)


class Sampler(Protocol):
    """Every rank calls it with the same prompts and gets the same groups."""

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        """Ask for groups; returns a ticket, before they are there."""

    def collect(self, ticket: Any) -> list[Group]: ...


class Order(Protocol):
    """Which prompts come next; `seed_for_next` is a seed for what is sampled for them."""

    def take(self, k: int) -> list[int]: ...

    def seed_for_next(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class EngineSampler:
    """`n` responses of the engine's policy to each prompt, with their rewards.

    `shares`: how many to each prompt of a batch, where that differs.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        rewards: RewardPool,
        timer: PhaseTimer,
        n: int,
        sampling: SamplingConfig,
        shares: Callable[[Sequence[Prompt]], list[int]] | None = None,
    ) -> None:
        self._rollouts, self._rewards, self._timer = rollouts, rewards, timer
        self._n, self._sampling, self._shares = n, sampling, shares

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        shares = [self._n] * len(prompts) if self._shares is None else self._shares(prompts)
        tickets = []
        for i, n in enumerate(sorted(set(shares))):
            members = [p for p, share in enumerate(shares) if share == n]
            of_share = seed if i == 0 else derived_seed(seed, n)
            chosen = [prompts[p] for p in members]
            tickets.append((members, self._rollouts.submit(chosen, n, self._sampling, of_share)))
        return tickets

    def collect(self, ticket: Any) -> list[Group]:
        found: dict[int, Group] = {}
        with self._timer.phase("rollout"):
            for members, asked in ticket:
                found |= dict(zip(members, self._rollouts.collect(asked), strict=True))
        groups = [found[p] for p in range(len(found))]
        with self._timer.phase("reward"):
            self.score(groups)
        return groups

    def score(self, groups: list[Group]) -> None:
        """Each rank verifies every world-size-th group; then all learn all rewards.

        Raises RolloutError, on all ranks, where one cannot start a worker in the place of one that is gone.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        problem = None
        try:
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
                log.warning(warning)


def _verdict(rollout: Rollout) -> tuple[dict[str, float], float, dict[str, str]]:
    return rollout.rewards, rollout.reward, rollout.reward_errors


class DatasetSampler:
    """Each prompt's demonstration as its only response: what supervised fine-tuning trains on."""

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        return prompts

    def collect(self, ticket: Any) -> list[Group]:
        return [Group(prompt, [_demonstration(prompt)]) for prompt in ticket]


class FileSampler:
    """Each prompt's responses of the data set, with their rewards: offline training."""

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        return prompts

    def collect(self, ticket: Any) -> list[Group]:
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


@dataclass
class BatchSampling:
    """What members may ask for while a batch is composed (`algorithms.members.Sampling`)."""

    step: int
    seed: int
    sampler: Callable[[int], EngineSampler] | None
    writer: PromptWriter
    end_token_id: int
    scorer: Callable[[list[Group]], None] | None
    policy: Callable[[TrainBatch], Tensor] | None = None  # log-probs of all response tokens
    asked: int = 0

    def ask(self, prompts: Sequence[Prompt], n: int) -> list[Group]:
        assert self.sampler is not None, "without an engine there is nobody to ask"
        self.asked += 1
        sampler = self.sampler(n)
        return sampler.collect(sampler.submit(prompts, derived_seed(self.seed, self.asked)))

    @property
    def longest_prompt(self) -> int:
        return self.writer.longest

    def extended(self, prompt: Prompt, text: str, *, before: bool = False) -> Prompt | None:
        return self.writer.extended(prompt, text, before=before)

    def encode(self, text: str) -> list[int]:
        return self.writer.encode(text)

    def encode_response(self, text: str) -> list[int]:
        ids = self.writer.encode(text)
        return ids if ids[-1:] == [self.end_token_id] else [*ids, self.end_token_id]

    def texts(
        self, function: str, groups: Sequence[Group], n: int, options: Mapping[str, Any]
    ) -> list[list[str]]:
        def ask() -> list[list[str]]:
            return _checked(load_function(function)(groups, n, **options), len(groups), n)

        texts: list[list[str]] = _asked_once(f"algorithm.members: {function}", ask)
        return texts

    def score(self, groups: list[Group]) -> None:
        assert self.scorer is not None, "without an engine there are no rewards"
        self.scorer(groups)

    def mean_logp(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        assert self.policy is not None, "the trainer gives its policy"
        if not prompts:
            return []
        rows = TrainBatch.from_groups(
            [
                Group(prompt, [Rollout(list(ids), [], "", "stop", -1, source="exit")])
                for prompt, ids in zip(prompts, responses, strict=True)
            ]
        )
        mean_n: list[float] = rows.sequence_mean(self.policy(rows)).tolist()
        return mean_n


class ComposedSampler:
    """A sampler's groups with the prior of their prompts, what joins them, and the tracker told of them.

    `greedy` samples the most likely response of every prompt, or `expected(prompt)` says its prior.
    `answers(n)` is a sampler of n responses, for members that ask, and `policy(rows)` gives log-probs. `step`
    is set by the trainer.
    """

    def __init__(
        self,
        base: Sampler,
        writer: PromptWriter,
        members: Sequence[JoinGroups],
        end_token_id: int,
        *,
        answers: Callable[[int], EngineSampler] | None = None,
        greedy: Sampler | None = None,
        tracker: SuccessTracker | None = None,
        expected: Callable[[Prompt], float] | None = None,
        policy: Callable[[TrainBatch], Tensor] | None = None,
    ) -> None:
        self.step = 1
        self._base, self._writer, self._members, self._end = base, writer, members, end_token_id
        self._expected = expected
        self._answers, self._greedy, self._tracker, self._policy = answers, greedy, tracker, policy

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        greedy = None if self._greedy is None else self._greedy.submit(prompts, seed)
        return self._base.submit(prompts, seed), greedy, seed

    def collect(self, ticket: Any) -> list[Group]:
        asked, greedy, seed = ticket
        groups = self._base.collect(asked)
        if self._greedy is not None:
            best = self._greedy.collect(greedy)
            groups = [replace(g, prior=b.rollouts[0].reward) for g, b in zip(groups, best, strict=True)]
        elif self._expected is not None:
            groups = [replace(g, prior=self._expected(g.prompt)) for g in groups]
        elif self._tracker is not None:
            groups = [replace(g, prior=self._tracker.expected_reward(g.prompt)) for g in groups]
        if self._tracker is not None:
            self._tracker.learn(groups)
        scorer = None if self._answers is None else self._answers(1).score
        for number, member in enumerate(self._members):
            of_member = derived_seed(seed, number, 1)
            sampling = BatchSampling(
                self.step, of_member, self._answers, self._writer, self._end, scorer, self._policy
            )
            groups = member(groups, sampling)
        return groups


def shaped(shaper: Shaper, groups: list[Group], step: int) -> list[Group]:
    """`shaper(groups, step)` on every rank; what it asks outside is asked once. A collective."""
    if not shaper.outside:
        return shaper(groups, step)
    where = f"algorithm.shapers: {shaper.name}"
    rewards = _asked_once(where, lambda: [group.rewards for group in shaper(groups, step)])
    return [rewarded(group, mine) for group, mine in zip(groups, rewards, strict=True)]


class Shapers:
    """`algorithm.shapers`, one after the other, on every rank alike.

    Raises RolloutError where they leave nothing of `limit` batches in a row: a run would sample for ever.
    """

    def __init__(self, shapers: Sequence[Shaper], limit: int) -> None:
        self._shapers, self._limit = shapers, limit
        self._forget()

    def _forget(self) -> None:
        self._batches, self._rewards = 0, list[float]()
        self._dropped = Counter[str]()  # groups, by the shaper

    def __call__(self, groups: list[Group], step: int) -> list[Group]:
        left = groups
        for i, shaper in enumerate(self._shapers):
            before, left = len(left), shaped(shaper, left, step)
            self._dropped[f"algorithm.shapers.{i} ({shaper.name})"] += before - len(left)
        if left:
            self._forget()
            return left
        self._batches += 1
        self._rewards += [reward for group in groups for reward in group.rewards]
        if self._batches < self._limit:
            return left
        dropped = ", ".join(f"{name} dropped {count}" for name, count in self._dropped.most_common() if count)
        low, high = min(self._rewards), max(self._rewards)
        raise RolloutError(
            f"step {step}: nothing was left to train on of {self._batches} batches in a row: {dropped} "
            f"groups, whose rewards were from {low:g} to {high:g}. If these are not what they should be, see "
            "rewards.components; otherwise loosen these shapers, take other prompts or a larger rollout.n, "
            "or raise train.max_empty_batches"
        )


def _asked_once(where: str, ask: Callable[[], Any]) -> Any:
    """`ask()`, by rank 0, on every rank. A collective.

    It calls a function of the user's. Whatever that raises, every rank raises as RolloutError, so that none
    waits for another and the run saves itself.
    """
    said, cause = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            said = {"value": ask()}
        except Exception as error:
            said, cause = {"error": described(error)}, error
    said = broadcast_msgpack(said)
    if "error" in said:
        raise RolloutError(f"{where}: {said['error']}") from cause
    return said["value"]


def _checked(texts: Any, groups: int, n: int) -> list[list[str]]:
    """What a teacher function returned. Raises ValueError where it is not `n` texts for each group."""
    listed = [list(given) for given in texts]
    if len(listed) != groups or any(len(given) != n for given in listed):
        found = [len(given) for given in listed]
        raise ValueError(f"expected {n} texts for each of {groups} groups, it returned {found}")
    return [[str(text) for text in given] for given in listed]


def responses_of(allocation: Allocation, tracker: SuccessTracker, n: int) -> Callable[..., list[int]]:
    """How many responses each prompt of a batch gets."""

    def shares(prompts: Sequence[Prompt]) -> list[int]:
        known = [tracker.known(prompt) for prompt in prompts]
        return allocation.shares([None if record is None else record.success for record in known], n)

    return shares


class BatchQueue:
    """Batches of `size` prompts' groups in the order of the data, asked for before they are needed."""

    def __init__(self, order: Order, prompts: Sequence[Prompt], sampler: Sampler, size: int) -> None:
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
