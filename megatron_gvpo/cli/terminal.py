"""Lines for the terminal: results, errors, and a notice while something slow is loaded."""

from __future__ import annotations

import errno
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, TextIO, cast

from megatron_gvpo.core.environment import is_first_process
from megatron_gvpo.core.launch import report
from megatron_gvpo.core.redaction import hide

SILENCE = 1.0  # seconds before a notice names the library that is being loaded
SCREENFUL, END = 2000, 400  # characters shown of an error's message; the last END of them are its end


def say(text: str, file: TextIO | None = None) -> None:
    """Print on the first rank only."""
    if is_first_process():
        print(hide(text), file=file, flush=True)


def refuse(error: Exception, code: int = 2, everywhere: bool = False) -> int:
    """Print the error and return the exit code.

    Only the first rank of each node prints, because one node may lack files or packages that the others have.
    In a Slurm job every rank prints, to its own log; with `everywhere`, for an error that one rank alone may
    have, always.
    """
    rank, logged = os.environ.get("RANK", "0"), "MEGATRON_GVPO_LOGS" in os.environ
    where = "" if rank == "0" or logged else f" on node {platform.node()} (rank {rank})"
    is_alone = "WORLD_SIZE" not in os.environ  # other variables may belong to another job
    text = f"error{where}: {_readable(hide(str(error)))}"
    if os.environ.get("LOCAL_RANK", "0") == "0" or logged or is_alone or everywhere:
        print(text, file=sys.stderr, flush=True)
    else:
        report(text)
    return code


def _readable(text: str) -> str:
    """At most a screenful of a text, without characters that move the cursor: it may hold a user's data.

    The end is kept, too, because the problem is often there, after the input.
    """
    if len(text) > SCREENFUL:
        more = f" ... ({len(text) - SCREENFUL} more characters) ... "
        text = text[: SCREENFUL - END] + more + text[-END:]
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Print "loading NAME ..." if the block takes longer than a second.

    Only the first rank prints, on stderr, and only to a terminal, not to logs and pipes.
    """
    if not is_first_process() or not sys.stderr.isatty():
        yield
        return
    notice = threading.Timer(SILENCE, say, [f"loading {name} ...", sys.stderr])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def open_standard_streams() -> None:
    """Open standard input, output and error on the null device where the parent process has closed them.

    Otherwise files that a run opens would get their descriptors, and output of libraries would go into the
    files. Standard output shows letters that its encoding lacks as escapes, as standard error does.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system returns the lowest free descriptor, which is this one.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - open to the end
    if isinstance(sys.stdout, TextIOWrapper):  # a response may have letters that the locale lacks
        sys.stdout.reconfigure(errors="backslashreplace")


class PrintError(OSError):
    """Raised if standard output is a file that cannot be written."""


class _ForgivingStream:
    """A text stream that hides secrets, and drops text that can no longer be printed.

    `must_be_complete`: it drops text only if a pipe's reader has ended; otherwise it raises PrintError.
    """

    def __init__(self, stream: TextIO, must_be_complete: bool = False) -> None:
        self._stream, self._must_be_complete = stream, must_be_complete

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropped():
            self._stream.write(hide(text))
        return len(text)

    def flush(self) -> None:
        with self._dropped():
            self._stream.flush()

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # The stream keeps the text, and would fail again at the next one and at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if self._must_be_complete and error.errno != errno.EPIPE:
                raise PrintError(f"the output cannot be written: {error.strerror}") from None


@contextmanager
def outliving_terminal(must_be_complete: bool = False) -> Iterator[None]:
    """Context in which the process outlives its terminal, and the reader of a pipe, such as `head`.

    `must_be_complete`: the printed lines are the command's result, so a full disk under standard output
    raises PrintError.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _ForgivingStream(before[0], must_be_complete))
    sys.stderr = cast(TextIO, _ForgivingStream(before[1]))
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout, sys.stderr = before
