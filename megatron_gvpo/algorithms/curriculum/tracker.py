"""The record of every prompt's successes, and the reward that is expected of it before its next responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from megatron_gvpo.algorithms.base import Block, WithFunction
from megatron_gvpo.core.user_functions import call_function, refused
from megatron_gvpo.groups import Prompt


class PromptHistory(NamedTuple):
    """The record of a prompt.

    `success`, in [0, 1], is its success rate among the responses seen; `expected` is the expected success of
    the next response, an estimate that is worth `weight` responses.
    """

    success: float
    expected: float
    weight: float


class Counts(NamedTuple):
    """Successes and failures of a prompt, and the number of imagined responses that the count began with."""

    won: float
    lost: float
    imagined: float


class Tracker(Block):
    """Beta counts of every prompt: a <- decay a + successes, b <- decay b + failures, after every visit.

    The counts begin as weight * expected and weight * (1 - expected); before the responses of a batch are
    seen, the expected success is a / (a + b). This is SPO's tracker (arXiv 2509.13232), except that SPO's
    decay follows the policy's KL since the prompt was last seen, and here it is a constant, applied once a
    visit. A reward r counts as (r - low) / (high - low) of a success, clipped to [0, 1].
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
        """The counts before the first visit."""
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
        """The reward that corresponds to an expected success."""
        return self.low + (self.high - self.low) * success


class Prior(Block):
    """A source of the reward that is expected of a prompt."""

    # True if the block gives an expected reward.
    gives_prior: ClassVar[bool] = True
    # The engine samples the most likely response of every prompt, and its reward is the prior.
    greedy: ClassVar[bool] = False

    name: str

    @property
    def function_of_prompt(self) -> Callable[[Prompt], float] | None:
        """The function that gives the expected reward of a prompt, where the prompt alone decides it."""
        return None


class NoPrior(Prior):
    """No reward is expected."""

    gives_prior: ClassVar[bool] = False

    name: Literal["none"] = "none"


class GreedyPrior(Prior):
    """The reward of the policy's most likely response, which is not trained (ReMax, arXiv 2310.10505)."""

    needs_engine: ClassVar[bool] = True
    greedy: ClassVar[bool] = True

    name: Literal["greedy"] = "greedy"


class FunctionPrior(WithFunction, Prior):
    """A user's function: `function(prompt, **options)` -> the expected reward.

    This is the interface for a learned prior such as V_0 (arXiv 2602.03584). Every rank calls the function,
    so it must give every rank the same.
    """

    arguments: ClassVar[tuple[str, ...]] = ("prompt",)

    name: Literal["function"] = "function"

    @property
    def function_of_prompt(self) -> Callable[[Prompt], float]:
        return self.expected

    def expected(self, prompt: Prompt) -> float:
        where = ("prior.function", self.function)
        value = call_function(*where, prompt, **self.options)
        try:
            expected = float(value)
        except (TypeError, ValueError, OverflowError):
            raise refused(*where, f"expected a number, it returned {type(value).__name__}") from None
        if not math.isfinite(expected):
            raise refused(*where, f"expected a finite number, it returned {expected}")
        return expected


class TrackedPrior(Prior):
    """The expected reward that follows from earlier responses to the prompt (`algorithm.tracker`)."""

    needs_tracker: ClassVar[bool] = True

    name: Literal["tracker"] = "tracker"
