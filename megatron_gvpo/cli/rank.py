"""Runs one rank of a cluster job under torchrun: `python -m megatron_gvpo.cli.rank train CONFIG.yaml ...`.

A program FILE.py may take the place of the `megatron-gvpo` command (`train`). The rank's output goes to
$MEGATRON_GVPO_LOGS/rank_<RANK>.log. A failure goes to rank_<RANK>.failed.json, where
`megatron_gvpo.cluster.failures` looks for the first failure of the whole job.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from megatron_gvpo.core.redaction import hide


def main() -> int:
    name = f"rank_{int(os.environ['RANK']):05}"
    logs = Path(os.environ["MEGATRON_GVPO_LOGS"])
    with (logs / f"{name}.log").open("ab", buffering=0) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    print(f"{time.strftime('%T')} rank {os.environ['RANK']} on {_node()}, process {os.getpid()}", flush=True)
    try:
        code = _program() if sys.argv[1].endswith(".py") else _command()
    except Exception:
        with suppress(OSError):  # if the error is a full disk, it cannot be recorded
            problem = hide(traceback.format_exc())
            _record(logs / f"{name}.failed.json", problem)
            print(problem, end="", file=sys.stderr)
            sys.stderr.flush()
        os._exit(1)  # an orderly shutdown of the communicators would wait for the other ranks
    if code:  # the command has printed its error to the log
        _record(logs / f"{name}.failed.json", f"exit code {code}; see the end of its log")
    return code


def _command() -> int:
    from megatron_gvpo.cli import run_command

    return run_command()


def _program() -> int:
    """Runs FILE.py and returns its exit code. No SystemExit means exit code 0."""
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _record(file: Path, problem: str) -> None:
    file.write_text(json.dumps({"node": _node(), "time": time.time(), "problem": problem}))


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


if __name__ == "__main__":
    sys.exit(main())
