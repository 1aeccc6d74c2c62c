"""The choice of the prompts of a batch, and the number of responses to each of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.base import Block, RunSizes, only_with
from megatron_gvpo.algorithms.curriculum.tracker import PromptHistory


class PromptChoice(Block):
    """A rule by which the prompts of a batch are chosen."""

    # Prompts are drawn by `weight`; otherwise they come in the order of the data (data.shuffle).
    weighted: ClassVar[bool] = False

    name: str

    @property
    def stated_in(self) -> str | None:
        """The field of the data record that states a success rate, for prompts not visited yet."""
        return None

    def weight(self, known: PromptHistory | None) -> float:
        """The weight of a prompt relative to the others, by its history."""
        return 1.0


class InOrder(PromptChoice):
    """Every prompt once an epoch, in random order (data.shuffle) or in the data's."""

    name: Literal["in_order"] = "in_order"


class SuccessRate(PromptChoice):
    """Draw prompts by their success rate p, without repetition in a batch (GPG's code, arXiv 2504.02546).

    favour  hard    1 - p
            soft    1 - p, and 0 where p is 0 or 1
            medium  1 where 0 < p < 1, else 0
            unsure  sqrt(v (1 - v)) / N^gamma: SPO (arXiv 2509.13232), v = a / N the success that the tracker
                    expects, N = a + b its counts
    A prompt that was not visited has weight 1. `floor` is added to every weight, so that no prompt is lost.
    `field` names the field of the data record with a success rate; it is p until the prompt is visited.
    """

    needs_tracker: ClassVar[bool] = True
    needs_rewards: ClassVar[bool] = True
    weighted: ClassVar[bool] = True

    name: Literal["success_rate"] = "success_rate"
    favour: Literal["hard", "soft", "medium", "unsure"] = "hard"
    floor: float = Field(0.05, ge=0)
    gamma: float = Field(0.5, ge=0)
    field: str | None = None

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(gamma=(self.favour == "unsure", "favour=unsure"))

    @property
    def stated_in(self) -> str | None:
        return self.field

    @property
    def record_fields(self) -> dict[str, str]:
        return {} if self.field is None else {"field": self.field}

    def weight(self, known: PromptHistory | None) -> float:
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


class Allocation(Block):
    """A rule that divides the responses of a batch among its prompts."""

    name: str

    def shares(self, success: Sequence[float | None], n: int) -> list[int]:
        """The number of responses to each prompt, by its success rate (None before it is visited).

        `n` is rollout.n.
        """
        raise NotImplementedError


class Equal(Allocation):
    """Give every prompt rollout.n responses."""

    name: Literal["equal"] = "equal"

    def shares(self, success: Sequence[float | None], n: int) -> list[int]:
        return [n] * len(success)


class Knapsack(Allocation):
    """Gives more responses to prompts that gain most (Knapsack RL, arXiv 2509.25849), rollout.n on average.

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

    def idle_in(self, run: RunSizes) -> str | None:
        if self.low < run.responses:
            return None
        return f"low={self.low}: all prompts have rollout.n={run.responses} responses, and none are left over"

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
