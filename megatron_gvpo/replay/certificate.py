"""The certificate of a mismatch: the causes of the gap between engine and trainer, and the worst tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Cause:
    """A cause of the gap, with statistics of the gaps of its tokens, in nats."""

    side: str  # "engine", "trainer", or "both" for the policy's own change
    name: str
    detail: str
    tokens: int
    responses: int
    share: float  # the cause's share of the sum of squares of all gaps
    mean: float  # mean absolute gap
    largest: float
    bound: float | None = None  # the largest gap that rounding explains

    def is_rounding(self, dtype: str) -> bool:
        """True if a run in this dtype that has no fault also has this cause."""
        is_exchange = self.name == "routing" and self.bound is not None
        return self.side == "both" or is_exchange or (self.name == "precision" and self.detail == dtype)


@dataclass(frozen=True)
class Token:
    """A token with a large gap, and its log-prob by engine, trainer and judge."""

    response: int
    token: int
    text: str
    engine: float
    trainer: float
    judge: float
    cause: str


@dataclass(frozen=True)
class Certificate:
    """The causes of a step's gap, the largest share first."""

    step: int
    dtype: str
    tokens: int
    abs_mean: float
    abs_max: float
    kl: float
    causes: list[Cause] = field(default_factory=list)
    worst: list[Token] = field(default_factory=list)
    left_out: int = 0  # responses that the trainer scored only after the step's first update

    @property
    def is_rounding(self) -> bool:
        return all(cause.is_rounding(self.dtype) for cause in self.causes)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n")
