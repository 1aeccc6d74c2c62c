"""A point of scaling.py, one layout on some ranks, and the phases of its steps."""

from __future__ import annotations

from typing import NamedTuple

PHASES = ("rollout", "reward", "scoring", "training", "optimizer", "sync", "waiting", "other")


class Point(NamedTuple):
    """Strong or weak scaling, a number of ranks, and a layout."""

    mode: str  # "strong" or "weak"
    ranks: int
    layout: str  # overrides of the configuration

    @property
    def name(self) -> str:
        short = self.layout.replace("parallel.", "").replace("sequence_parallel=true", "sp").replace("=", "")
        return "-".join([self.mode, str(self.ranks), *short.split()])
