"""Runs `python -m megatron_gvpo` in milliseconds, in the fork of a process that has imported it.

That process has a single thread. pytest's own process has more, which libraries have started, and the fork of
a process with threads can wait for ever for a lock that one of them held.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

SECONDS = 600.0  # for one command, and before the first one for the imports
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["forked_command", "torch", "transformers", "megatron_gvpo.cli", "megatron_gvpo.checks.preflight"]
)


def command(directory: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code (-n: signal n), output and errors of the command, run in `directory`.

    Raises AssertionError if it does not end in time.
    """
    process = _FORKS.Process(target=_be_the_command, args=(directory, arguments))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"megatron-gvpo {' '.join(arguments)} has not ended in {SECONDS:.0f} s")
    out, err = ((directory / name).read_text(errors="replace") for name in ("out", "err"))
    return process.exitcode, out, err


def _be_the_command(directory: Path, arguments: tuple[str, ...]) -> None:
    os.chdir(directory)
    sys.stdout, sys.stderr = open("out", "w"), open("err", "w")  # noqa: SIM115 - the process ends
    sys.argv = ["megatron-gvpo", *arguments]
    code: Any = 1
    try:
        runpy.run_module("megatron_gvpo", run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
