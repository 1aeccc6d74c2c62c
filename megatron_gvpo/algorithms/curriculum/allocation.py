"""The number of responses to each prompt of a batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from megatron_gvpo.algorithms.base import Block


class Allocation(Block):
    """A rule by which the responses of a batch are shared out among its prompts."""

    name: str

    def shares(self, success: Sequence[float | None], n: int) -> list[int]:
        """The number of responses to each prompt, by its success rate (None before it is visited).

        `n` is rollout.n.
        """
        raise NotImplementedError


class Equal(Allocation):
    """rollout.n responses to every prompt."""

    name: Literal["equal"] = "equal"

    def shares(self, success: Sequence[float | None], n: int) -> list[int]:
        return [n] * len(success)


class Knapsack(Allocation):
    """Responses where they are worth most (Knapsack RL, arXiv 2509.25849), rollout.n a prompt on average.

    Maximises the sum of V(N, p) = (1 - p^N - (1 - p)^N) p (1 - p)^2 with low <= N <= high. V is concave in
    N, so giving one response after the other to the prompt that gains most is exact. Responses from which no
    prompt gains go to prompts with p = 0, up to `high`, and then to the others. A prompt that was not visited
    has rollout.n.
    """

    needs_engine: ClassVar[bool] = True
    needs_tracker: ClassVar[bool] = True

    name: Literal["knapsack"] = "knapsack"
    low: PositiveInt = 2
    high: PositiveInt = 128

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.low > self.high:
            raise ValueError(
                f"low={self.low} exceeds high={self.high}: a prompt has from low to high responses"
            )
        return self

    def shares(self, success: Sequence[float | None], n: int) -> list[int]:
        known = [i for i, p in enumerate(success) if p is not None]
        shares = [n if p is None else min(self.low, n) for p in success]
        spare = n * len(known) - sum(shares[i] for i in known)

        def gain(i: int) -> float:
            p = success[i]
            assert p is not None
            return knapsack_value(shares[i] + 1, p) - knapsack_value(shares[i], p)

        queue = [(-gain(i), i) for i in known if shares[i] < self.high]
        heapq.heapify(queue)
        while spare and queue and queue[0][0] < 0:
            _, i = heapq.heappop(queue)
            shares[i], spare = shares[i] + 1, spare - 1
            if shares[i] < self.high:
                heapq.heappush(queue, (-gain(i), i))
        for takers in ([i for i in known if success[i] == 0], known):
            rest = [(shares[i], i) for i in takers if shares[i] < self.high]
            heapq.heapify(rest)
            while spare and rest:  # prompts with the fewest responses first
                count, i = heapq.heappop(rest)
                shares[i], spare = count + 1, spare - 1
                if shares[i] < self.high:
                    heapq.heappush(rest, (shares[i], i))
        return shares


def knapsack_value(n: int, p: float) -> float:
    """(1 - p^n - (1 - p)^n) p (1 - p)^2: the chance of a signal times its worth."""
    return (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2
