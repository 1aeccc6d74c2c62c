"""The live display of a run: a panel at the bottom of the terminal."""

from __future__ import annotations

import atexit
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import batched, pairwise
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_gvpo.observe.loggers.backend import Sample
from megatron_gvpo.observe.samples import one_line
from megatron_gvpo.observe.status import Status, clock, show

MAX_WIDTH = 100
FRAMES_PER_SECOND = 2
PHASE_STYLES = {
    "rollout": "bright_blue",
    "reward": "bright_magenta",
    "scoring": "cyan",
    "training": "green",
    "sync": "yellow",
    "checkpoint": "magenta",
    "other": "bright_black",
}
CELL_WIDTH = 25
CELLS = (
    ("reward/mean", "reward mean"),
    ("response/length", "response length"),
    ("train/loss", "loss"),
    ("eval/pass@1", "pass@1"),
    ("train/kl", "KL to reference"),
    ("train/grad_norm", "grad norm"),
    ("throughput/tokens_per_s", "tokens/s"),
    ("time/step", "seconds/step"),
    ("mismatch/kl", "engine mismatch"),
)


class LiveDisplay:
    """Draws a Status in place, twice a second; output of the program appears above it."""

    def __init__(self, status: Status, stream: TextIO, title: str) -> None:
        self._status = status
        self._title = title
        self._sample: Sample | None = None
        self._console = Console(file=stream, force_terminal=True)
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=FRAMES_PER_SECOND,
            # Redirect only streams that write to this terminal; text for a file still goes to the file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        out, err = sys.stdout, sys.stderr
        self._live.start()
        self._handlers = _reroute_logging({out: sys.stdout, err: sys.stderr})
        atexit.register(self.close)  # restore the terminal if the run ends by an error

    def update(self, status: Status) -> None:
        self._status = status

    def sample(self, sample: Sample) -> None:
        self._sample = sample

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._live.stop()
        for handler, stream in self._handlers:
            handler.setStream(stream)

    def _draw(self) -> RenderableType:
        return draw(self._status, self._title, min(self._console.width, MAX_WIDTH), self._sample)


def draw(status: Status, title: str, width: int, sample: Sample | None = None) -> RenderableType:
    """Return the panel, `width` columns wide, with the latest sample if there is one."""
    inside = width - 4
    parts = [
        _bar(status),
        Text(),
        _numbers(status, inside),
        _course(status, inside),
        Text(),
        *_time(status, inside),
    ]
    if sample is not None:
        parts += [Text(), Text(one_line(sample, inside), no_wrap=True, overflow="ellipsis")]
    body = Group(*parts)
    heading = Text(title, "bold")
    return Panel(body, title=heading, title_align="left", border_style="bright_black", width=width)


def _bar(status: Status) -> RenderableType:
    total = status.total_steps
    width = len(str(total))
    remaining = status.remaining
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_row(
        Text.assemble("step ", (f"{status.step:>{width}}", "bold"), (f"/{total}", "bright_black")),
        ProgressBar(total=max(total, 1), completed=status.step, complete_style="bright_blue"),
        Text.assemble(
            clock(status.elapsed),
            (f" elapsed · {'-:--' if remaining is None else clock(remaining)} left", "bright_black"),
        ),
    )
    return grid


def _numbers(status: Status, width: int) -> RenderableType:
    columns = min(3, max(1, width // CELL_WIDTH))
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in range(columns):
        grid.add_column(style="bright_black", no_wrap=True)
        grid.add_column(justify="right", ratio=1, no_wrap=True, min_width=9)
    for row in batched(CELLS, columns):
        grid.add_row(*(text for name, label in row for text in (label, _value(status, name))))
    return grid


def _value(status: Status, name: str) -> Text:
    value = status.latest.get(name)
    if value is None:
        return Text("-", "bright_black")
    return Text(show(name, value), "bold" if math.isfinite(value) else "bold red")


def _course(status: Status, width: int) -> RenderableType:
    """Return the reward over all steps so far, as a line of blocks between its lowest and highest value."""
    label = "reward  "
    history = list(status.reward_history)
    return Text.assemble((label, "bright_black"), (sparkline(history, width - len(label)), "bright_blue"))


def _time(status: Status, width: int) -> tuple[RenderableType, RenderableType]:
    """Return the time of the steps by phase: one bar in the phases' colours, and its legend."""
    bar, legend = Text(no_wrap=True), Text(no_wrap=True, overflow="ellipsis")
    filled, before = 0, 0.0
    for phase, share in status.phase_shares.items():
        style = PHASE_STYLES.get(phase, "white")
        before += share
        bar.append("█" * (round(before * width) - filled), style)
        filled = round(before * width)
        legend.append(f"{phase} ", style).append(f"{share:.0%}  ")
    if not legend:
        return Text("░" * width, "bright_black"), Text("waiting for the first step", "bright_black")
    return bar, legend


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most `width` blocks; more values than that are averaged in equal stretches."""
    if not values:
        return ""
    count = min(len(values), width)
    cuts = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / span)] for mean in means)


def _reroute_logging(replaced: Mapping[TextIO, TextIO]) -> list[tuple[logging.StreamHandler[TextIO], TextIO]]:
    """Point log handlers at the streams that Live put in place of theirs; returns (handler, old stream).

    A handler keeps the stream that it was created with, so Live's own redirection does not reach it.
    """
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    before = []
    for logger in loggers:
        for handler in getattr(logger, "handlers", []):  # logging's PlaceHolders have no handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream in replaced:
                before.append((handler, handler.stream))
                handler.setStream(replaced[handler.stream])
    return before
