"""The state of a run that the displays show, with its numbers in a readable form."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping


class Status:
    """The state of a run: the latest value of every metric, the rewards of all steps, the times."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.step = 0
        self.metrics: dict[str, float] = {}  # metrics of the last step
        self.latest: dict[str, float] = {}  # the latest value of each metric
        self.reward_history: list[float] = []
        self.phase_seconds: dict[str, float] = {}
        self._step_seconds = 0.0
        self._start = time.monotonic()
        self._first: tuple[int, float] | None = None  # the first step that was reported, and its time
        self._last = self._start

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        # Dicts are replaced, never changed: the live display draws from another thread.
        self._last = time.monotonic()
        self._first = self._first or (step, self._last)
        self.step = step
        self.metrics = dict(metrics)
        self.latest = {**self.latest, **metrics}
        if math.isfinite(reward := metrics.get("reward/mean", math.nan)):
            self.reward_history.append(reward)
        seconds = dict(self.phase_seconds)
        for name, value in metrics.items():
            if name.startswith("time/") and name != "time/step":
                phase = name.removeprefix("time/")
                seconds[phase] = seconds.get(phase, 0.0) + value
        self.phase_seconds = seconds
        self._step_seconds += metrics.get("time/step", 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since the display started."""
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float | None:
        """Seconds left at the mean pace so far; None before the second step."""
        if self._first is None or self.step == self._first[0]:
            return None
        pace = (self._last - self._first[1]) / (self.step - self._first[0])
        return max(0.0, pace * (self.total_steps - self.step) - (time.monotonic() - self._last))

    @property
    def phase_shares(self) -> dict[str, float]:
        """Each phase's share of the time of all steps so far; "other" is the time outside all phases."""
        in_phases = sum(self.phase_seconds.values())
        total = max(in_phases, self._step_seconds)
        if total <= 0:
            return {}
        return {
            **{phase: seconds / total for phase, seconds in self.phase_seconds.items()},
            "other": (total - in_phases) / total,
        }


def show(name: str, value: float) -> str:
    """Format a metric's value for people."""
    if not math.isfinite(value):
        return str(value)
    if name.endswith("length"):
        return f"{value:.1f}"
    if name.startswith("eval/"):
        return f"{value:.1%}"
    if name == "reward/mean":
        return f"{value:.3f}"
    if name == "throughput/tokens_per_s":
        return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """75 -> "1:15", 3675 -> "1:01:15"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
