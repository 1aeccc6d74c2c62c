"""The progress of a run on its output: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

from megatron_gvpo.observe.status import Status, clock, show

SECONDS_BETWEEN_LINES = 10.0


class Display(Protocol):
    def update(self, status: Status) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Shows the metrics of every step; use it on rank 0 only.

    `mode`: "live" draws a display in place; "lines" prints a line every ten seconds and for every
    evaluation; "off" shows nothing; "auto" is live on a terminal and lines elsewhere. Text that the program
    prints goes above the live display. Close it, or use it as a context manager.
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
        """Show the metrics of step `step`; a metric that it lacks keeps its latest value."""
        self.status.update(step, metrics)
        if self._display is not None:
            self._display.update(self.status)

    def note(self, text: str) -> None:
        """Print a line that stays, such as "checkpoint written" or "step skipped"."""
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


class LineDisplay:
    """Prints a line every ten seconds, and for every evaluation, the first and the last step."""

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
    """Format one step as a line of plain ASCII."""
    now, width = status.metrics, len(str(status.total_steps))
    parts = [f"step {status.step:>{width}}/{status.total_steps}"]
    parts += [f"{label} {show(name, now[name])}" for name, label in LABELS if name in now]
    held_out = [name for name in now if name.startswith("eval/") and (name != "eval/errors" or now[name])]
    parts += [f"{name[5:]} {show(name, now[name])}" for name in held_out]
    if (seconds := now.get("time/step")) is not None:
        shares = ", ".join(f"{phase} {share:.0%}" for phase, share in status.phase_shares.items())
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


def _can_redraw(stream: TextIO) -> bool:
    from rich.console import Console

    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
