"""Composes a batch: sampled groups, their priors, and the responses that a method's members add."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_gvpo.algorithms.custom import CustomMember
from megatron_gvpo.algorithms.members.base import JoinGroups
from megatron_gvpo.core.collectives import call_on_rank0
from megatron_gvpo.core.user_functions import load_function
from megatron_gvpo.data.order import SuccessTracker
from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.huggingface.end_tokens import ended
from megatron_gvpo.sampling.samplers import EngineSampler, PendingGroups, Sampler
from megatron_gvpo.servers.request import derived_seed
from megatron_gvpo.types import TrainBatch


@dataclass(frozen=True)
class PendingBatch:
    """A batch that was requested; `greedy`: the most likely responses, if they give the prior."""

    sampled: PendingGroups[Any]
    greedy: PendingGroups[Any] | None
    seed: int

    @property
    def tickets(self) -> list[Any]:
        """All tickets of the engine for this batch."""
        parts = [self.sampled] if self.greedy is None else [self.sampled, self.greedy]
        return [ticket for part in parts for _, ticket in part.tickets]


class ComposedSampler:
    """Gives a sampler's groups their priors, reports them to the tracker, and lets the members join them.

    A prompt's prior is the reward of the response that `greedy` samples, or `expected(prompt)`, or the
    tracker's estimate. Members may use three functions: `answers(n)` returns a sampler of n responses to each
    prompt, `score(groups)` fills in the rewards, and `policy(rows)` returns log-probs. Responses without one
    of the reward's `components` are refused.
    """

    def __init__(
        self,
        base: Sampler[Any],
        writer: PromptWriter,
        members: Sequence[JoinGroups],
        end_token_ids: Sequence[int],
        *,
        answers: Callable[[int], EngineSampler[Any]] | None = None,
        score: Callable[[list[Group]], None] | None = None,
        greedy: Sampler[Any] | None = None,
        tracker: SuccessTracker | None = None,
        expected: Callable[[Prompt], float] | None = None,
        policy: Callable[[TrainBatch], Tensor] | None = None,
        components: Set[str] = frozenset(),
    ) -> None:
        self._base = base
        self._writer = writer
        self._members = members
        self._ends = end_token_ids
        self._expected = expected
        self._score = score
        self._answers = answers
        self._greedy = greedy
        self._tracker = tracker
        self._policy = policy
        self._components = components

    def request(self, prompts: Sequence[Prompt], seed: int) -> PendingBatch:
        """Ask for a group of each prompt; returns at once."""
        greedy = None if self._greedy is None else self._greedy.begin(prompts, seed)
        return PendingBatch(self._base.begin(prompts, seed), greedy, seed)

    def wait_for_complete(self, batches: Sequence[PendingBatch], count: int, due: int) -> list[int]:
        """Wait until `count` batches, the first `due` among them, are complete; returns their indices.

        A collective.
        """
        assert isinstance(self._base, EngineSampler), "rollout.over_sampling_prompts needs an engine"
        return self._base.wait_for([batch.tickets for batch in batches], count, due)

    def joined(self, batches: Sequence[PendingBatch]) -> PendingBatch:
        """Return one pending batch with the prompts of all `batches`."""
        greedy = [batch.greedy for batch in batches if batch.greedy is not None]
        return PendingBatch(
            PendingGroups.joined([batch.sampled for batch in batches]),
            PendingGroups.joined(greedy) if greedy else None,
            batches[0].seed,
        )

    def complete(self, batch: PendingBatch, step: int) -> list[Group]:
        """Wait for the batch's groups; return them with priors and members, for `step`. A collective."""
        groups = self._with_priors(self._base.finish(batch.sampled), batch)
        if self._tracker is not None:
            self._tracker.learn(groups)
        for number, member in enumerate(self._members):
            context = BatchContext(
                step=step,
                seed=derived_seed(batch.seed, number, 1),
                sampler=self._answers,
                writer=self._writer,
                end_token_ids=self._ends,
                scorer=self._score,
                policy=self._policy,
            )
            groups = member(groups, context)
            if isinstance(member, CustomMember):
                member.check_components(groups, self._components)
        return [self._with_texts(group) for group in groups]

    def _with_texts(self, group: Group) -> Group:
        """The group with the text of demonstrations, which shapers compare; the data have only tokens."""
        rollouts = [
            replace(rollout, text=self._writer.decode(rollout.token_ids))
            if rollout.source == "demonstration" and not rollout.text
            else rollout
            for rollout in group.rollouts
        ]
        return replace(group, rollouts=rollouts)

    def _with_priors(self, groups: list[Group], batch: PendingBatch) -> list[Group]:
        if self._greedy is not None and batch.greedy is not None:
            best = self._greedy.finish(batch.greedy)
            return [replace(g, prior=b.rollouts[0].reward) for g, b in zip(groups, best, strict=True)]
        if self._expected is not None:
            return [replace(g, prior=self._expected(g.prompt)) for g in groups]
        if self._tracker is not None:
            return [replace(g, prior=self._tracker.expected_reward(g.prompt)) for g in groups]
        return groups


@dataclass
class BatchContext:
    """Answers the members of a batch while it is composed (see `algorithms.members.base.MemberContext`)."""

    step: int
    seed: int
    sampler: Callable[[int], EngineSampler[Any]] | None
    writer: PromptWriter
    end_token_ids: Sequence[int]
    scorer: Callable[[list[Group]], None] | None
    policy: Callable[[TrainBatch], Tensor] | None = None  # log-probs of all response tokens
    requests: int = 0  # requests that the members have made so far

    def ask(self, prompts: Sequence[Prompt], n: int) -> list[Group]:
        assert self.sampler is not None, "without an engine there is nobody to ask"
        self.requests += 1
        sampler = self.sampler(n)
        pending = sampler.begin(prompts, derived_seed(self.seed, self.requests))
        groups = deque(sampler.finish(pending))  # all conversations of a group may be lost
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
        return list(ended(self.writer.encode_turn(text), self.end_token_ids))

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
    listed = [list(answer) for answer in texts]
    if len(listed) != groups or any(len(answer) != n for answer in listed):
        counts = [len(answer) for answer in listed]
        raise ValueError(f"expected {n} texts for each of {groups} groups, it returned {counts}")
    return [[None if text is None else str(text) for text in answer] for answer in listed]
