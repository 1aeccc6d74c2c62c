"""One rank of a Slurm job: `python -m megatron_gvpo.cluster.rank train CONFIG.yaml ...`, under torchrun.

Its output goes to $MEGATRON_GVPO_LOGS/rank_<RANK>.log, and how it failed to rank_<RANK>.failed.json, from
which `megatron_gvpo.cluster.failures` tells the first failure of the whole job.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path


def main() -> int:
    name = f"rank_{int(os.environ['RANK']):05}"
    logs = Path(os.environ["MEGATRON_GVPO_LOGS"])
    with (logs / f"{name}.log").open("ab", buffering=0) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    print(f"{time.strftime('%T')} rank {os.environ['RANK']} on {_node()}, process {os.getpid()}", flush=True)
    try:
        from megatron_gvpo.cli import main as command_line

        code = command_line()
    except Exception:
        _record(logs / f"{name}.failed.json", traceback.format_exc())
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: communicators that end in order wait for the other ranks
    if code and os.environ["RANK"] == "0":  # every rank refuses, and the first says why
        _record(logs / f"{name}.failed.json", f"exit code {code}; see the end of its log")
    return code


def _record(file: Path, problem: str) -> None:
    file.write_text(json.dumps({"node": _node(), "time": time.time(), "problem": problem}))


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


if __name__ == "__main__":
    sys.exit(main())
