"""Lines for the terminal: results, errors, and a notice while something slow is loaded."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

SILENCE = 1.0  # seconds before a notice says what is being loaded


def say(text: str, file: TextIO | None = None) -> None:
    """Print on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=file, flush=True)


def refuse(error: Exception, code: int = 2) -> int:
    """Print the error and return the exit code.

    Only the first rank of each node prints, because one node may lack what the others have. In a Slurm job
    every rank prints, to its own log.
    """
    rank, logged = os.environ.get("RANK", "0"), "MEGATRON_GVPO_LOGS" in os.environ
    where = "" if rank == "0" or logged else f" on node {platform.node()} (rank {rank})"
    if os.environ.get("LOCAL_RANK", "0") == "0" or logged:
        print(f"error{where}: {error}", file=sys.stderr, flush=True)
    return code


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Print "loading NAME ..." if the block takes longer than a second.

    Only the first rank prints, on stderr, and only to a terminal: logs and pipes stay as they are.
    """
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        yield
        return
    notice = threading.Timer(SILENCE, say, [f"loading {name} ...", sys.stderr])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def quieten() -> None:
    """Keep libraries' warnings off the terminal; python -W or PYTHONWARNINGS brings them back.

    The libraries warn of packages that this machine lacks, which `doctor` reports better, and of each other.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
