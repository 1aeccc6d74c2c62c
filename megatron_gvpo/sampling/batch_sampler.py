"""Composes a batch: sampled groups, their priors, and the responses that a method's members add."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.algorithms.members.base import JoinGroups
from megatron_gvpo.algorithms.shapers.base import rewarded
from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.core.user_functions import UserFunctionError, described, load_function
from megatron_gvpo.data.order import SuccessTracker
from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.huggingface.end_tokens import ended
from megatron_gvpo.sampling.samplers import EngineSampler, Sampler
from megatron_gvpo.servers.request import derived_seed
from megatron_gvpo.types import OnWait, TrainBatch

if TYPE_CHECKING:
    from megatron_gvpo.algorithms.shapers.base import Shaper


class ComposedSampler:
    """Gives a sampler's groups their priors, tells the tracker of them, and lets the members join them.

    A prior comes from `greedy`, which samples each prompt's most likely response, from `expected(prompt)`, or
    from the tracker. Members may ask `answers(n)`, a sampler of n responses; `score(groups)`,
    which fills in rewards; and `policy(rows)`, log-probs.
    """

    def __init__(
        self,
        base: Sampler,
        writer: PromptWriter,
        members: Sequence[JoinGroups],
        end_token_ids: Sequence[int],
        *,
        answers: Callable[[int], EngineSampler] | None = None,
        score: Callable[[list[Group]], None] | None = None,
        greedy: Sampler | None = None,
        tracker: SuccessTracker | None = None,
        expected: Callable[[Prompt], float] | None = None,
        policy: Callable[[TrainBatch], Tensor] | None = None,
    ) -> None:
        self._base, self._writer, self._members, self._ends = base, writer, members, end_token_ids
        self._expected, self._score = expected, score
        self._answers, self._greedy, self._tracker, self._policy = answers, greedy, tracker, policy

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        greedy = None if self._greedy is None else self._greedy.submit(prompts, seed)
        return self._base.submit(prompts, seed), greedy, seed

    def collect(self, ticket: Any, step: int, on_wait: OnWait = None) -> list[Group]:
        """The ticket's groups as training step `step` takes them. A collective."""
        asked, greedy, seed = ticket
        groups = self._base.collect(asked, on_wait)
        if self._greedy is not None:
            best = self._greedy.collect(greedy, on_wait)
            groups = [replace(g, prior=b.rollouts[0].reward) for g, b in zip(groups, best, strict=True)]
        elif self._expected is not None:
            groups = [replace(g, prior=self._expected(g.prompt)) for g in groups]
        elif self._tracker is not None:
            groups = [replace(g, prior=self._tracker.expected_reward(g.prompt)) for g in groups]
        if self._tracker is not None:
            self._tracker.learn(groups)
        for number, member in enumerate(self._members):
            context = BatchContext(
                step,
                derived_seed(seed, number, 1),
                self._answers,
                self._writer,
                self._ends,
                self._score,
                self._policy,
                on_wait,
            )
            groups = member(groups, context)
        return groups


@dataclass
class BatchContext:
    """Answers the members of a batch while it is composed (see `algorithms.members.base.MemberContext`)."""

    step: int
    seed: int
    sampler: Callable[[int], EngineSampler] | None
    writer: PromptWriter
    end_token_ids: Sequence[int]
    scorer: Callable[[list[Group]], None] | None
    policy: Callable[[TrainBatch], Tensor] | None = None  # log-probs of all response tokens
    on_wait: OnWait = None
    asked: int = 0

    def ask(self, prompts: Sequence[Prompt], n: int) -> list[Group]:
        assert self.sampler is not None, "without an engine there is nobody to ask"
        self.asked += 1
        sampler = self.sampler(n)
        found = sampler.collect(sampler.submit(prompts, derived_seed(self.seed, self.asked)), self.on_wait)
        groups = deque(found)  # of conversations, whole groups may be lost
        return [
            groups.popleft() if groups and groups[0].prompt == prompt else Group(prompt, [])
            for prompt in prompts
        ]

    @property
    def longest_prompt(self) -> int:
        return self.writer.longest

    def extended(self, prompt: Prompt, text: str, *, before: bool = False) -> Prompt | None:
        return self.writer.extended(prompt, text, before=before)

    def encode(self, text: str) -> list[int]:
        return self.writer.encode(text)

    def encode_response(self, text: str) -> list[int]:
        return list(ended(self.writer.encode(text), self.end_token_ids))

    def texts(
        self, function: str, groups: Sequence[Group], n: int, options: Mapping[str, Any]
    ) -> list[list[str | None]]:
        def ask() -> list[list[str | None]]:
            return _checked(load_function(function)(groups, n, **options), len(groups), n)

        texts: list[list[str | None]] = call_on_rank0(f"step {self.step}: algorithm.members: {function}", ask)
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


def _checked(texts: Any, groups: int, n: int) -> list[list[str | None]]:
    """A teacher function's texts as strings, None for one that it does not have.

    Raises ValueError unless there are `n` for each group.
    """
    listed = [list(given) for given in texts]
    if len(listed) != groups or any(len(given) != n for given in listed):
        found = [len(given) for given in listed]
        raise ValueError(f"expected {n} texts for each of {groups} groups, it returned {found}")
    return [[None if text is None else str(text) for text in given] for given in listed]


# Batches of prompts in the data's order, sampled ahead of the trainer.


class Order(Protocol):
    """Chooses the next prompts; `seed_for_next` is the seed of their samples."""

    def take(self, k: int) -> list[int]: ...

    def seed_for_next(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BatchSampler(Protocol):
    """Samples the groups of a batch. All ranks give the same arguments and get the same groups."""

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        """Ask for a group of each prompt; returns a ticket at once."""

    def collect(self, ticket: Any, step: int, on_wait: OnWait = None) -> list[Group]:
        """The ticket's groups, in prompt order, for training step `step`."""


class BatchQueue:
    """Batches of the groups of `size` prompts, in the order of the data, asked for before they are needed."""

    def __init__(self, order: Order, prompts: Sequence[Prompt], sampler: BatchSampler, size: int) -> None:
        self._order, self._prompts, self._sampler, self._size = order, prompts, sampler, size
        self._asked: deque[tuple[dict[str, Any], Any]] = deque()  # the order's state before it, ticket

    def ask(self, count: int) -> None:
        """Keep `count` batches in progress or ready."""
        while len(self._asked) < count:
            before, seed = self._order.state_dict(), self._order.seed_for_next()
            prompts = [self._prompts[i] for i in self._order.take(self._size)]
            self._asked.append((before, self._sampler.submit(prompts, seed)))

    def collect(self, step: int, on_wait: OnWait = None) -> list[Group]:
        """The groups of the oldest batch that was asked for; the engine calls `on_wait` while it waits."""
        return self._sampler.collect(self._asked.popleft()[1], step, on_wait)

    def state_dict(self) -> dict[str, Any]:
        """The order's state before the oldest batch not collected: a resumed run asks for it again."""
        return self._asked[0][0] if self._asked else self._order.state_dict()


# Runs the shapers of a method on a batch.


def shaped(shaper: Shaper, groups: list[Group], step: int) -> list[Group]:
    """`shaper(groups, step)` on every rank. One that asks outside runs on rank 0 alone. A collective."""
    if not shaper.outside:
        return shaper(groups, step)

    def ask() -> list[list[float]]:
        rewards = [group.rewards for group in shaper(groups, step)]
        if wrong := [reward for mine in rewards for reward in mine if not math.isfinite(reward)]:
            raise ValueError(f"{len(wrong)} rewards are not finite, such as {wrong[0]}")
        return rewards

    rewards = call_on_rank0(f"step {step}: algorithm.shapers: {shaper.name}", ask)
    return [rewarded(group, mine) for group, mine in zip(groups, rewards, strict=True)]


def run_shapers(
    shapers: Sequence[Shaper], groups: list[Group], step: int
) -> tuple[list[Group], dict[str, int]]:
    """Run `algorithm.shapers`, one after the other, on every rank alike. A collective.

    Returns the groups that are left, and how many each shaper dropped, by its key and name.
    """
    left, dropped = groups, dict[str, int]()
    for i, shaper in enumerate(shapers):
        before, left = len(left), shaped(shaper, left, step)
        if before > len(left):
            dropped[f"algorithm.shapers.{i} ({shaper.name})"] = before - len(left)
    return left, dropped


# Calls a user's function on rank 0 and gives every rank its result.


def call_on_rank0(where: str, call: Callable[[], Any]) -> Any:
    """`call()` of rank 0, on every rank, in msgpack's types. A collective.

    Whatever the user's function raises, every rank raises as RolloutError, which begins with `where`: no rank
    waits for another, and the run writes a checkpoint.
    """
    said, cause = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            said = {"value": call()}
        except Exception as error:
            text = str(error) if isinstance(error, UserFunctionError) else described(error)
            said, cause = {"error": text}, error
    said = broadcast_msgpack(said)
    if "error" in said:
        raise RolloutError(f"{where}: {said['error']}") from cause
    return said["value"]
