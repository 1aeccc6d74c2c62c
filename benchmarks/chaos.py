"""Chaos tests: whole runs with seeded faults, restarted as Slurm restarts jobs.

No sample may be lost, counted twice or sampled from old weights.

    python benchmarks/chaos.py --schedules 60 --out benchmarks/results/chaos_embedded.jsonl
    python benchmarks/chaos.py --servers sglang --schedules 40 --out benchmarks/results/chaos_sglang.jsonl

Every seed gives a run of two ranks and twelve steps with two to four faults (parts/chaos/schedules.py). A run
that ends is started again with `--resume=auto` until it is done. It passes if every group of every step is
complete, sampled from the step's weights and counted once, in the data's order (checks.py); with the
embedded engine every metric but times, and every bit of the final weights, must equal those of an undisturbed
run.
With `--servers` two real servers run on two nodes (nodes.py), and faults strike them, too.

The ranks are forked from a process that has imported the libraries (starter.py). Results are appended
to FILE, a line a schedule; seeds that are there already are left out, so the suite can be run in pieces. The
exit status is 1 if a schedule fails. It needs root, to mount the small file system that faults fill, a C
compiler, and Debian's libfaketime.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

from lib.chaos.schedules import Engine, schedule  # noqa: E402 - from this directory
from lib.chaos.suite import Suite  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Whole runs with seeded faults.")
    parser.add_argument("--servers", choices=["sglang", "vllm"], help="rollouts from servers of this engine")
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule (0)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no schedule after so many minutes")
    parser.add_argument("--out", type=Path, help="append the results to this file, and go on where it ends")
    args = parser.parse_args()
    engine: Engine = "served" if args.servers else "embedded"
    deadline, failed = time.monotonic() + 60 * args.minutes, 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the servers and the ranks
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        suite = opened.enter_context(Suite(folder, args.servers))
        for seed in seeds_to_run(args.out, args.seed, args.schedules):
            if time.monotonic() > deadline:
                break
            result = suite.try_schedule(schedule(seed, engine))
            failed += not result["passed"]
            line = json.dumps(result)
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(line + "\n")
    return 1 if failed else 0


def seeds_to_run(file: Path | None, first: int, count: int) -> list[int]:
    """The seeds without a result in `file`."""
    done = set()
    if file is not None and file.exists():
        done = {json.loads(line)["seed"] for line in file.read_text().splitlines()}
    return [seed for seed in range(first, first + count) if seed not in done]


if __name__ == "__main__":
    sys.exit(main())
