"""Progress of rehearsed ranks: they write it to a file, and the command shows it while it waits for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

from megatron_gvpo.core.clock import running_seconds

# Seconds that one phase may take. The longest is the plan of a push, half a minute for a billion of a rank's
# weights: 20 minutes for the 40 billion that fill 80 GB. On a busy machine it takes three times as long.
LIMIT = 3600.0
_LOOK = 0.2  # seconds between two looks at the file


class StuckRankError(Exception):
    """A phase of a rank did not end within LIMIT seconds."""


class ProgressFile:
    """A rank's side: each phase is a line when it begins, and another with its seconds when it ends."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @contextmanager
    def phase(self, rank: int, name: str) -> Iterator[None]:
        """Report the block, whose phase stays begun if the block raises."""
        begin = time.perf_counter()
        self._write(f"{rank}\t{name}\t")
        yield
        self._write(f"{rank}\t{name}\t{time.perf_counter() - begin:.1f}")

    def _write(self, line: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{line}\n")


def to_stderr(line: str) -> None:
    """Write to standard error, because standard output has the command's result."""
    print(line, file=sys.stderr, flush=True)


def follow(process: Popen[str], file: Path, report: Callable[[str], None]) -> int:
    """Wait for the end of the process of ranks; returns its exit code. Each phase that ends is a line.

    Raises StuckRankError, which names the rank and the phase. The caller ends the process then.
    """
    current, shown, since = "the start of its process", 0, running_seconds()
    while True:
        code = process.poll()  # called before the file is read, so that no line is missed
        lines = file.read_text().split("\n")[:-1] if file.is_file() else []
        for line in lines[shown:]:
            rank, name, seconds = line.split("\t")
            current, since = f"rank {rank}, {name}", running_seconds()
            if seconds:
                report(f"{current}: {seconds} s")
        shown = len(lines)
        if code is not None:
            return code
        if running_seconds() - since > LIMIT:
            raise StuckRankError(
                f"{current}: not done after {LIMIT:.0f} s, so the rehearsal was ended; a phase takes minutes "
                "unless this machine swaps or its file system does not answer"
            )
        time.sleep(_LOOK)
