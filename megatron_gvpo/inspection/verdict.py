"""A verdict: one result of an inspection before a run, and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failure", "not tried"]


@dataclass(frozen=True)
class RunVerdict:
    """A finding about a run.

    Level `failure`: the run cannot work. `warning`: it works, but not as intended.
    """

    topic: str
    level: Level
    sentence: str
    remedy: str = ""

    def line(self) -> str:
        """The verdict as the terminal shows it."""
        mark = {"ok": "ok", "warning": "WARNING", "failure": "FAILURE", "not tried": "not tried"}[self.level]
        remedy = f"\n{'':>12}-> {self.remedy}" if self.remedy else ""
        return f"{mark:>9}  {self.topic}: {self.sentence}{remedy}"


def ok(topic: str, sentence: str) -> RunVerdict:
    return RunVerdict(topic, "ok", sentence)


def warning(topic: str, sentence: str, remedy: str = "") -> RunVerdict:
    return RunVerdict(topic, "warning", sentence, remedy)


def failure(topic: str, sentence: str, remedy: str = "") -> RunVerdict:
    return RunVerdict(topic, "failure", sentence, remedy)


def not_tried(topic: str, reason: str) -> RunVerdict:
    return RunVerdict(topic, "not tried", reason)
