"""Counts of every prompt's successes, from which its next reward is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from megatron_gvpo.algorithms.base import Block


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

    They begin as weight * expected and weight * (1 - expected); before the responses of a batch are seen, the
    expected success is a / (a + b). This is SPO's tracker (arXiv 2509.13232), except that SPO's decay follows
    the policy's KL since the prompt was last seen, and here it is a constant, applied once a visit. A reward
    r counts as (r - low) / (high - low) of a success, clipped to [0, 1].
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
