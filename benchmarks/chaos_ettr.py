"""Useful time of a run with a fault every ten steps (ETTR, effective training time ratio), by the wall clock.

    python benchmarks/chaos_ettr.py --servers sglang --steps 50 --step-seconds 15 --out FILE.json

The run is the user's own command, `megatron-gvpo train ... --nproc 2 --resume=auto`, started again as
Slurm would whenever it ends. Most of a step is waiting for a slow judge, so that steps are as long as those
of large models and two cores suffice. In every tenth step, at a random moment, the next fault of FAULTS
strikes.

The useful time is that of the steps in the finished run's metrics.jsonl (`time/step`), each counted once:
steps, or parts of steps, that were lost and done again count once. A step in which a fault struck counts for
no more than the median step, because the rest of its time is recovery. Wall time begins with the first start
and ends with the last exit, all starts and waits included; servers of `megatron-gvpo serve` run already.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]

from helpers import tiny_run  # noqa: E402 - from tests/
from lib.chaos.checks import PROMPTS, check, final_history  # noqa: E402 - from this directory
from lib.chaos.clock import Clock  # noqa: E402
from lib.chaos.job import Job, ledger_of  # noqa: E402
from lib.chaos.nodes import two_nodes  # noqa: E402
from lib.chaos.schedules import Fault, Schedule  # noqa: E402
from lib.chaos.starter import kill_session  # noqa: E402
from lib.chaos.strikes import Judge, Scene  # noqa: E402
from lib.chaos.suite import overrides, served_overrides  # noqa: E402

from megatron_gvpo.core.json_files import read_metrics  # noqa: E402

EVERY = 10
FAULTS = ("kill rank", "kill server", "lose node", "kill reward worker", "tell to stop")


class Started:
    """A command that runs in a session of its own."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def end(self) -> None:
        kill_session(self.pid)
        self._process.wait()


def faults_of(args: argparse.Namespace) -> list[Fault]:
    """Return one fault for every EVERY steps. It strikes at a random moment of their middle step."""
    rng = random.Random(args.seed)
    kinds = [kind for kind in FAULTS if args.servers or "server" not in kind]
    steps = range(EVERY // 2, args.steps, EVERY)
    return [
        Fault(kinds[i % len(kinds)], step, "step", rng.uniform(0, args.step_seconds), 0.0, rng.randint(0, 1))
        for i, step in enumerate(steps)
    ]


def run(args: argparse.Namespace, folder: Path, opened: ExitStack) -> dict[str, Any]:
    """Run the command until the training is complete; return the result."""
    task, ledger, log = folder / "task", folder / "ledger.jsonl", folder / "log"
    tiny_run.make(task)
    judge = Judge(ledger, args.step_seconds / PROMPTS)
    opened.callback(judge.kill)
    scene = Scene(folder / "out", judge, Clock(folder), random.Random(args.seed))
    how = ("checkpoint.every=1", "checkpoint.asynchronous=true")
    own = overrides(Schedule(args.seed, "embedded", "dp2", how, ()), judge.port, scene.out)
    own.append(f"train.steps={args.steps}")
    if args.servers:
        scene.servers, _ = opened.enter_context(two_nodes(args.servers, task, folder / "servers"))
        own += served_overrides(args.servers, scene.servers)
    command = [sys.executable, "-m", "megatron_gvpo", "train", str(task / "run.yaml"), *own, "--nproc", "2"]

    def start(options: Sequence[str]) -> Started:
        return Started([*command, *options], log)

    faults = faults_of(args)
    load, begin = os.getloadavg(), time.monotonic()
    job = Job(start, scene.out, log, scene, faults, args.steps, patience=600.0)
    try:
        job.run()
    except BaseException:
        print(job.tail(), file=sys.stderr)
        raise
    wall = time.monotonic() - begin
    history = final_history(ledger_of(ledger))
    order = [[group["prompt"] for group in history[step]] for step in sorted(history)]
    responses = check(job, ledger, None, order)
    records = read_metrics(scene.out / "metrics.jsonl")
    times = {record["step"]: float(record["time/step"]) for record in records if record["step"]}
    useful = useful_seconds(times, [fault.step for fault in faults])
    return {
        "engine": args.servers or "embedded",
        "steps": args.steps,
        "fault_every_steps": EVERY,
        "useful": "sum of time/step over the finished run's steps, the median at most where a fault struck",
        "wall": "from the first start of the command to its last exit",
        "ettr": round(useful / wall, 4),
        "useful_seconds": round(useful, 1),
        "wall_seconds": round(wall, 1),
        "mean_step_seconds": round(useful / args.steps, 2),
        "responses": responses,
        "struck": job.struck,
        "starts": [
            {name: round(v, 1) if isinstance(v, float) else v for name, v in asdict(start).items()}
            for start in job.starts
        ],
        "load_before": load,
        "load_after": os.getloadavg(),
    }


def useful_seconds(times: dict[int, float], struck: Sequence[int]) -> float:
    """The sum of the steps' times; a step in which a fault struck counts for the median at most."""
    median = statistics.median(times.values())
    return sum(min(seconds, median) if step in struck else seconds for step, seconds in times.items())


def main() -> int:
    parser = argparse.ArgumentParser(description="Useful time of a run with faults.")
    parser.add_argument("--servers", choices=["sglang", "vllm"], help="rollouts from servers of this engine")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--step-seconds", type=float, default=15.0, help="seconds of a step that are waiting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the command's processes
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="chaos-ettr-")))
        result = run(args, folder, opened)
    result = {
        "command": " ".join(["python", "benchmarks/chaos_ettr.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **result,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
