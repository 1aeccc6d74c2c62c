"""Shows the output of users' code, each line after the name of its function, up to a number of lines."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence

from megatron_gvpo.core.redaction import hide

LINES = 20  # the most lines of a function that each rank shows in a step
WIDTH = 500  # the most characters of a line that are shown
_LONGEST = 4 * WIDTH  # bytes of a line to keep: a character takes up to 4
_AT_ONCE = 1 << 16  # the bytes of one read, which is the size of a pipe's buffer
_MARK = re.compile(rb"\0(\d{1,6})\0")  # the worker writes it where another function's output begins
_PART_OF_MARK = re.compile(rb"\0\d{0,6}\Z")


def _show(line: str) -> None:
    """Print the line."""
    print(line, file=sys.stderr, flush=True)


class Printout:
    """Shows up to LINES lines of each function in a step, from all workers, and how many lines were left out.

    `names` are those of the functions, in the order in which the workers load them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._shown: Counter[str] = Counter()

    def line(self, function: int, line: bytes) -> None:
        """Show a line of the function with this index."""
        if not line.strip():
            return
        # Users' code may write a mark with any number.
        name = self._names[function] if function < len(self._names) else "rewards"
        self._shown[name] += 1
        if self._shown[name] <= LINES:
            _show(f"[{name}] {_readable(line)}")

    def end_step(self) -> None:
        """Show how many lines were left out; the next step's lines are counted from 0."""
        for name, count in self._shown.items():
            if count > LINES:
                _show(f"[{name}] ... and {count - LINES:,} more lines ({LINES} a step are shown)")
        self._shown.clear()


class Output:
    """The output of one worker: the read end of a pipe, which its processes write to."""

    def __init__(self, descriptor: int, printout: Printout) -> None:
        self.descriptor: int | None = descriptor  # None: all of its processes have closed it
        os.set_blocking(descriptor, False)
        self._printout = printout
        self._function = 0  # index of the function that prints
        self._line = b""  # an unfinished line
        self._mark = b""  # bytes that may be the beginning of a mark

    def drain(self) -> bool:
        """Show new output, up to a limit, as a function may print without end. False if there is none."""
        if self.descriptor is None:
            return False
        try:
            data = os.read(self.descriptor, _AT_ONCE)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        *_, last = parts = _MARK.split(self._mark + data)
        cut = _PART_OF_MARK.search(last)
        self._mark = b"" if cut is None else last[cut.start() :]
        parts[-1] = last[: len(last) - len(self._mark)]
        first, *marked = parts
        self._feed(first)
        for function, text in zip(marked[::2], marked[1::2], strict=True):
            self.flush()
            self._function = int(function)
            self._feed(text)
        return True

    def end_step(self) -> None:
        """Show the rest of the output of the step's functions, at most as much as a pipe's buffer."""
        for _ in range(4):  # one read may return less than has arrived
            if not self.drain():
                break
        self.flush()

    def _feed(self, text: bytes) -> None:
        *lines, rest = (self._line + text).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._printout.line(self._function, line)
        self._line = rest[:_LONGEST]

    def flush(self) -> None:
        """Show a line whose end has not arrived."""
        line, self._line = self._line, b""
        self._printout.line(self._function, line)

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
