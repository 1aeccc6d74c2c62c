"""Which prompts a batch holds, how many responses each gets, and what reward is expected of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.runtime.user_functions import check_call, load_function
from megatron_gvpo.types import Prompt


class Record(NamedTuple):
    """What is known of a prompt: its `success` among the responses seen, in [0, 1], and what is `expected`
    of the next, which is worth `weight` responses.
    """

    success: float
    expected: float
    weight: float


class Counts(NamedTuple):
    """Successes and failures of a prompt, and the responses imagined before any was seen."""

    won: float
    lost: float
    imagined: float


class Tracker(Block):
    """Beta counts of every prompt: a <- decay a + successes, b <- decay b + failures, after every visit.

    They begin as weight * expected and weight * (1 - expected), and the expected success is a / (a + b),
    before a batch is seen: SPO's tracker (arXiv 2509.13232), whose decay follows the policy's KL since the
    prompt was last seen; here it is a constant, once a visit. A reward r counts as (r - low) / (high - low)
    of a success, within [0, 1].
    """

    decay: float = Field(0.9, gt=0, le=1)
    expected: float = Field(0.5, ge=0, le=1)
    weight: float = Field(2.0, gt=0)
    low: float = 0.0
    high: float = 1.0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.low >= self.high:
            raise ValueError(
                f"low={self.low} must be below high={self.high}: rewards are measured between them"
            )
        return self

    @property
    def start(self) -> Counts:
        """Before the first visit."""
        return Counts(0.0, 0.0, self.weight)

    def updated(self, counts: Counts, rewards: Sequence[float]) -> Counts:
        """The counts after one visit with these rewards."""
        success = [min(max((r - self.low) / (self.high - self.low), 0.0), 1.0) for r in rewards]
        won, lost, imagined = (self.decay * count for count in counts)
        return Counts(won + sum(success), lost + len(success) - sum(success), imagined)

    def posterior(self, counts: Counts) -> float:
        """The expected success with these counts."""
        return (counts.won + counts.imagined * self.expected) / sum(counts)

    def reward(self, success: float) -> float:
        """The reward that an expected success means."""
        return self.low + (self.high - self.low) * success


class InOrder(Block):
    """Every prompt once an epoch, in random order (data.shuffle) or the data's."""

    name: Literal["in_order"] = "in_order"


class SuccessRate(Block):
    """Draw prompts by their success rate p, without repetition in a batch (GPG's code, arXiv 2504.02546).

    favour  hard    1 - p
            soft    1 - p, and 0 where p is 0 or 1
            medium  1 where 0 < p < 1, else 0
            unsure  sqrt(v (1 - v)) / N^gamma: SPO (arXiv 2509.13232), v = a / N the success that the tracker
                    expects, N = a + b its counts
    A prompt that was not visited has weight 1. `floor` is added to every weight, so that no prompt is lost.
    `field`: where the data record says a success rate, it is p until the prompt is visited.
    """

    name: Literal["success_rate"] = "success_rate"
    favour: Literal["hard", "soft", "medium", "unsure"] = "hard"
    floor: float = Field(0.05, ge=0)
    gamma: float = Field(0.5, ge=0)
    field: str | None = None

    def weight(self, known: Record | None) -> float:
        """Of a prompt, relative to the others'."""
        if known is None:
            return 1.0 + self.floor
        p = known.success
        match self.favour:
            case "hard":
                weight = 1 - p
            case "soft":
                weight = 1 - p if 0 < p < 1 else 0.0
            case "medium":
                weight = float(0 < p < 1)
            case "unsure":
                v = known.expected
                weight = (v * (1 - v)) ** 0.5 / known.weight**self.gamma
        return weight + self.floor


class Equal(Block):
    """rollout.n responses to every prompt."""

    name: Literal["equal"] = "equal"

    def shares(self, success: Sequence[float | None], n: int) -> list[int]:
        return [n] * len(success)


class Knapsack(Block):
    """Responses where they are worth most (Knapsack RL, arXiv 2509.25849), rollout.n a prompt on average.

    Maximises the sum of V(N, p) = (1 - p^N - (1 - p)^N) p (1 - p)^2 with low <= N <= high; V is concave in
    N, so that giving one response after the other to the prompt that gains most is exact. Prompts with p = 0
    gain nothing, and get what nobody gains from, up to `high`; then the others do. A prompt that was not
    visited has rollout.n.
    """

    name: Literal["knapsack"] = "knapsack"
    low: PositiveInt = 2
    high: PositiveInt = 128

    def shares(self, success: Sequence[float | None], n: int) -> list[int]:
        known = [i for i, p in enumerate(success) if p is not None]
        given = [n if p is None else min(self.low, n) for p in success]
        spare = n * len(known) - sum(given[i] for i in known)

        def gain(i: int) -> float:
            p = success[i]
            assert p is not None
            return knapsack_value(given[i] + 1, p) - knapsack_value(given[i], p)

        queue = [(-gain(i), i) for i in known if given[i] < self.high]
        heapq.heapify(queue)
        while spare and queue and queue[0][0] < 0:
            _, i = heapq.heappop(queue)
            given[i], spare = given[i] + 1, spare - 1
            if given[i] < self.high:
                heapq.heappush(queue, (-gain(i), i))
        for takers in ([i for i in known if success[i] == 0], known):
            rest = [(given[i], i) for i in takers if given[i] < self.high]
            heapq.heapify(rest)
            while spare and rest:  # the smallest first
                count, i = heapq.heappop(rest)
                given[i], spare = count + 1, spare - 1
                if given[i] < self.high:
                    heapq.heappush(rest, (given[i], i))
        return given


def knapsack_value(n: int, p: float) -> float:
    """(1 - p^n - (1 - p)^n) p (1 - p)^2: the chance of a signal times what it is worth."""
    return (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2


class NoPrior(Block):
    """No reward is expected."""

    name: Literal["none"] = "none"


class GreedyPrior(Block):
    """The reward of the policy's most likely response, which is not trained (ReMax, arXiv 2310.10505)."""

    name: Literal["greedy"] = "greedy"


class FunctionPrior(Block):
    """What a function of the user's says: `function(prompt, **options)` -> the expected reward.

    The interface for a learned prior such as V_0 (arXiv 2602.03584). It is called on every rank alike, so it
    must give all the same.
    """

    name: Literal["function"] = "function"
    function: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _callable(self) -> Self:
        check_call(load_function(self.function), "f(prompt, **options)", 1, self.options)
        return self

    def expected(self, prompt: Prompt) -> float:
        return float(load_function(self.function)(prompt, **self.options))


class TrackedPrior(Block):
    """What earlier responses to the prompt say (`algorithm.tracker`)."""

    name: Literal["tracker"] = "tracker"
