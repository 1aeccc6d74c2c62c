"""What a run shows while it goes on: a live display on a terminal, quiet lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

SECONDS_BETWEEN_LINES = 10.0


class Display(Protocol):
    def update(self, status: Status) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Shows the metrics of every step; for rank 0 only.

    `mode`: "live" is a display that stays in place, "lines" a line every ten seconds and for every
    evaluation, "off" nothing; "auto" is live on a terminal and lines elsewhere. Text that the program
    prints meanwhile goes above the live display. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        mode: Literal["auto", "live", "lines", "off"],
        total_steps: int,
        stream: TextIO | None = None,
        *,
        title: str = "training",
    ) -> None:
        stream = sys.stdout if stream is None else stream
        self.status = Status(total_steps)
        self._display: Display | None = None
        if mode == "live" or (mode == "auto" and _can_redraw(stream)):
            from megatron_gvpo.observe.live import LiveDisplay

            self._display = LiveDisplay(self.status, stream, title)
        elif mode != "off":
            self._display = LineDisplay(stream)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of step `step`; those that it lacks keep their latest value."""
        self.status.update(step, metrics)
        if self._display is not None:
            self._display.update(self.status)

    def note(self, text: str) -> None:
        """Say something that stays: a checkpoint was written, a step was skipped."""
        if self._display is not None:
            self._display.note(text)

    def close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Status:
    """Where a run stands: the latest value of every metric, the course of the reward, the clock."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.step = 0
        self.metrics: dict[str, float] = {}  # of the last step only
        self.latest: dict[str, float] = {}  # of the last step that had them
        self.reward_history: list[float] = []
        self.phase_seconds: dict[str, float] = {}
        self._step_seconds = 0.0
        self._start = time.monotonic()
        self._first: tuple[int, float] | None = None  # first step seen, and when
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
        """Seconds since the display began."""
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float | None:
        """Seconds left at the mean pace so far; None before two steps have been seen."""
        if self._first is None or self.step == self._first[0]:
            return None
        pace = (self._last - self._first[1]) / (self.step - self._first[0])
        return max(0.0, pace * (self.total_steps - self.step) - (time.monotonic() - self._last))

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time of all steps so far by phase, what no phase covers as "other"."""
        known = sum(self.phase_seconds.values())
        whole = max(known, self._step_seconds)
        if whole <= 0:
            return {}
        return {
            **{phase: seconds / whole for phase, seconds in self.phase_seconds.items()},
            "other": (whole - known) / whole,
        }


class LineDisplay:
    """One line every ten seconds, and for every evaluation, the first and the last step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = 0.0

    def update(self, status: Status) -> None:
        now = time.monotonic()
        evaluated = any(name.startswith("eval/") for name in status.metrics)
        if now >= self._next or evaluated or status.step == status.total_steps:
            self._next = now + SECONDS_BETWEEN_LINES
            self.note(format_line(status))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


def format_line(status: Status) -> str:
    """One step in plain ASCII."""
    now, width = status.metrics, len(str(status.total_steps))
    parts = [f"step {status.step:>{width}}/{status.total_steps}"]
    parts += [f"{label} {show(name, now[name])}" for name, label in LABELS if name in now]
    held_out = [name for name in now if name.startswith("eval/") and (name != "eval/errors" or now[name])]
    parts += [f"{name[5:]} {show(name, now[name])}" for name in held_out]
    if (seconds := now.get("time/step")) is not None:
        shares = ", ".join(f"{phase} {share:.0%}" for phase, share in status.shares.items())
        parts.append(f"{seconds:.2f} s/step ({shares})")
    if (left := status.remaining) is not None and status.step < status.total_steps:
        parts.append(f"{clock(left)} left")
    return "  ".join(parts)


LABELS = (
    ("reward/mean", "reward"),
    ("response/length", "length"),
    ("train/kl", "kl"),
    ("train/loss", "loss"),
    ("train/grad_norm", "grad norm"),
    ("mismatch/kl", "mismatch"),
    ("throughput/tokens_per_s", "tokens/s"),
)


def show(name: str, value: float) -> str:
    """A metric's value as people read it."""
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


def _can_redraw(stream: TextIO) -> bool:
    from rich.console import Console

    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
