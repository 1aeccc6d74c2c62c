"""The progress of a run on its output: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, Self, TextIO

from megatron_gvpo.core.redaction import hide
from megatron_gvpo.observe.loggers.backend import Sample
from megatron_gvpo.observe.samples import one_line
from megatron_gvpo.observe.status import Status, clock, show

SECONDS_BETWEEN_LINES = 10.0
LONGEST_SILENCE = 30.0  # seconds after which a line names the phase of a long step
WIDTH = 100  # characters of a sample's line

Phase = Callable[[], tuple[str, float] | None]  # returns the current phase of the step and its seconds so far


def _unknown() -> None:
    return None


class Display(Protocol):
    def update(self, status: Status) -> None: ...

    def sample(self, sample: Sample) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Shows the metrics of every step; use it on rank 0 only.

    `mode`: "live" draws a display in place; "lines" prints a line every ten seconds and for every evaluation;
    "all" prints every step with all its metrics; "off" shows nothing; "auto" is live on a terminal and lines
    elsewhere. `phase` returns the phase of a long step: after 30 seconds without a line, a line names it.
    Output of the program appears above the live display. Close the Progress, or use it as a context manager.
    """

    def __init__(
        self,
        mode: Literal["auto", "live", "lines", "all", "off"],
        total_steps: int,
        stream: TextIO | None = None,
        *,
        title: str = "training",
        phase: Phase = _unknown,
    ) -> None:
        stream = sys.stdout if stream is None else stream
        self.status = Status(total_steps)
        self._display: Display | None = None
        if mode == "live" or (mode == "auto" and _can_redraw(stream)):
            from megatron_gvpo.observe.live import LiveDisplay

            self._display = LiveDisplay(self.status, stream, title)
        elif mode != "off":
            self._display = LineDisplay(stream, total_steps, phase, every_step=mode == "all")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of step `step`; a metric that it lacks keeps its latest value."""
        self.status.update(step, metrics)
        if self._display is not None:
            self._display.update(self.status)

    def sample(self, sample: Sample) -> None:
        """Show one response."""
        if self._display is not None:
            self._display.sample(sample)

    def note(self, text: str) -> None:
        """Print a line that stays, such as "checkpoint written" or "step skipped"."""
        if self._display is not None:
            self._display.note(hide(text))

    def close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LineDisplay:
    """Prints a line every ten seconds, and for every evaluation, the first and the last step.

    A thread prints the phase of a step if nothing was printed for LONGEST_SILENCE seconds.
    """

    def __init__(self, stream: TextIO, total_steps: int, phase: Phase, every_step: bool) -> None:
        self._stream = stream
        self._next = 0.0
        self._total = total_steps
        self._every_step = every_step
        self._phase = phase
        self._step: int | None = None  # the last step that ended
        self._spoke = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._break_silence, name="progress lines", daemon=True)
        self._thread.start()

    def update(self, status: Status) -> None:
        now, self._step = time.monotonic(), status.step
        has_evaluation = any(name.startswith("eval/") for name in status.metrics)
        if self._every_step:
            metrics = "".join(f"\n  {name} {value:.6g}" for name, value in sorted(status.metrics.items()))
            self.note(format_line(status) + metrics)
        elif now >= self._next or has_evaluation or status.step == status.total_steps:
            self._next = now + SECONDS_BETWEEN_LINES
            self.note(format_line(status))

    def sample(self, sample: Sample) -> None:
        self.note(f"  {one_line(sample, WIDTH - 2)}")

    def note(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        with self._lock:
            print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
            self._spoke = time.monotonic()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _break_silence(self) -> None:
        while not self._over.wait(max(0.0, self._spoke + LONGEST_SILENCE - time.monotonic())):
            if time.monotonic() - self._spoke < LONGEST_SILENCE:
                continue
            if (running := self._phase()) is None or self._step is None:
                self._spoke = time.monotonic()
                continue
            phase, seconds = running
            self.note(f"step {self._step + 1}/{self._total}: {phase} for {clock(seconds)} so far")


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
    if (remaining := status.remaining) is not None and status.step < status.total_steps:
        parts.append(f"{clock(remaining)} left")
    return "  ".join(parts)


LABELS = (
    ("reward/mean", "reward"),
    ("response/length", "length"),
    ("train/kl", "kl"),
    ("train/loss", "loss"),
    ("train/grad_norm", "grad norm"),
    ("mismatch/kl", "mismatch"),
    ("speculation/acceptance", "accepted"),
    ("throughput/tokens_per_s", "tokens/s"),
)


def _can_redraw(stream: TextIO) -> bool:
    from rich.console import Console

    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
