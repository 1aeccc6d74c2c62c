"""Shows what reward functions print, line by line after the component's name, and bounds it."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from megatron_gvpo.core.redaction import hide

LINES = 20  # of a component in a step, on every rank
WIDTH = 500  # characters of a line
_LONGEST = 4 * WIDTH  # bytes of a line that are kept: its characters may have so many each
_AT_ONCE = 1 << 16  # bytes: a pipe holds no more
_MARK = re.compile(rb"\0(\d{1,6})\0")  # the worker writes it where another component's output begins
_PART_OF_MARK = re.compile(rb"\0\d{0,6}\Z")


def to_stderr(line: str) -> None:
    """Print the line."""
    print(line, file=sys.stderr, flush=True)


class Printout:
    """Shows the lines of all workers: so many of each component in a step, and the number of the others."""

    def __init__(self, names: Sequence[str], show: Callable[[str], None] = to_stderr) -> None:
        self._names, self._show = names, show
        self._shown: Counter[str] = Counter()

    def line(self, component: int, line: bytes) -> None:
        if not line.strip():
            return
        name = self._names[component] if component < len(self._names) else "rewards"
        self._shown[name] += 1
        if self._shown[name] <= LINES:
            self._show(f"[{name}] {_readable(line)}")

    def end_step(self) -> None:
        """Say how many lines were dropped; the next step's lines are counted from 0."""
        for name, count in self._shown.items():
            if count > LINES:
                self._show(f"[{name}] ... and {count - LINES:,} more lines ({LINES} a step are shown)")
        self._shown.clear()


class Output:
    """The output of one worker: the read end of a pipe, which its processes write to."""

    def __init__(self, descriptor: int, printout: Printout) -> None:
        self.descriptor: int | None = descriptor  # None: all of its processes have closed it
        os.set_blocking(descriptor, False)
        self._printout = printout
        self._component, self._rest = 0, b""
        self._held = b""  # what may be the beginning of a mark

    def drain(self) -> bool:
        """Show what has come, a bounded amount: a function may print without end. False if nothing has."""
        if self.descriptor is None:
            return False
        try:
            data = os.read(self.descriptor, _AT_ONCE)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        *_, last = parts = _MARK.split(self._held + data)
        cut = _PART_OF_MARK.search(last)
        self._held = b"" if cut is None else last[cut.start() :]
        parts[-1] = last[: len(last) - len(self._held)]
        first, *marked = parts
        self._feed(first)
        for component, text in zip(marked[::2], marked[1::2], strict=True):
            self.flush()
            self._component = int(component)
            self._feed(text)
        return True

    def end_step(self) -> None:
        """Show what the step's functions have printed to the end: no more than the pipe holds."""
        for _ in range(4):  # a read may give less than has come
            if not self.drain():
                break
        self.flush()

    def _feed(self, text: bytes) -> None:
        *lines, rest = (self._rest + text).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._printout.line(self._component, line)
        self._rest = rest[:_LONGEST]

    def flush(self) -> None:
        """Show a line without an end."""
        rest, self._rest = self._rest, b""
        self._printout.line(self._component, rest)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        self.flush()


def _readable(line: bytes) -> str:
    """Text without secrets, and without control characters, which could redraw the terminal."""
    text = hide(line[:_LONGEST].decode(errors="replace"))
    cut = f"{text[:WIDTH]} ..." if len(text) > WIDTH else text
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in cut)
