"""Runs seeded fault schedules on real rollout servers; every run must end with complete and current groups.

    python benchmarks/rollout_faults.py --engine sglang --schedules 20 --out FILE.json

Two servers run under a supervisor, and every seed gives a run of six steps with one to three faults at random
moments. A fault kills one or both servers (SIGKILL to the process group) or stops them (SIGSTOP) for up to
twelve seconds, during generation, during a push of weights, or in between. A run passes if every group of
every step is complete, every response comes from its step's weights, and the engine's log-probs equal the
trainer's to 2e-3 (updates are large, so stale or mixed weights would show). The exit status is 1 if a run
fails. A schedule takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers import tiny_run  # noqa: E402 - from tests/
from helpers.servers.faults import Fault, check, faulty_run, kill, stop  # noqa: E402
from helpers.servers.real_servers import ENGINES, running  # noqa: E402

from megatron_gvpo.servers.launch.supervise import Supervisor  # noqa: E402

STEPS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description="Seeded fault schedules on real rollout servers.")
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule (0)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        tiny_run.make(folder / "task")
        results = run_all(args, folder)
    passed = sum(result["passed"] for result in results)
    print(f"{passed} of {len(results)} schedules passed")
    if args.out:
        report = {
            "command": " ".join(["python", "benchmarks/rollout_faults.py", *sys.argv[1:]]),
            "machine": platform.machine(),
            "engine": args.engine,
            "passed": passed,
            "schedules": results,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if passed == len(results) else 1


def run_all(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    overrides = (
        "rollout.servers.count=2",
        "rollout.servers.restarts=1000",
        "rollout.servers.hang_timeout=60",
    )
    results = []
    with running(args.engine, folder / "task", folder / "servers", *overrides) as supervisor:
        for seed in range(args.seed, args.seed + args.schedules):
            names, faults = schedule(seed, supervisor)
            result: dict[str, Any] = {"seed": seed, "faults": names, "passed": True}
            begin = time.perf_counter()
            try:
                urls = [process.url for process in supervisor.processes]
                out = folder / f"run-{seed}"
                trainer, saboteur = faulty_run(
                    args.engine, folder / "task", out, urls, faults, f"train.steps={STEPS}"
                )
                check(trainer, saboteur, tiny_run.records(out))
                result["struck"] = saboteur.done
                result["responses"] = sum(
                    len(g.rollouts) for groups in saboteur.groups.values() for g in groups
                )
            except Exception:
                result |= {"passed": False, "error": traceback.format_exc()[-2000:]}
            result["seconds"] = round(time.perf_counter() - begin, 1)
            results.append(result)
            print(json.dumps(result), flush=True)
    return results


def schedule(seed: int, supervisor: Supervisor) -> tuple[list[str], list[Fault]]:
    """Return the faults of one seed, as text and as objects."""
    rng = random.Random(seed)
    names, faults = [], []
    for _ in range(rng.randint(1, 3)):
        step, moment = rng.randint(1, STEPS - 1), rng.choice(["generating", "pushing", "between"])
        victims = rng.choice([[0], [1], [0, 1]])
        seconds = rng.choice([0.0, rng.uniform(1.0, 12.0)])  # 0: killed
        delay = rng.uniform(0.0, 0.2)
        actions = [
            stop(supervisor.processes[v], seconds) if seconds else kill(supervisor.processes[v])
            for v in victims
        ]

        def act(actions: list[Any] = actions) -> None:
            for action in actions:
                action()

        faults.append(Fault(step, moment, act, delay))
        what = f"stopped for {seconds:.1f} s" if seconds else "killed"
        names.append(f"server {' and '.join(map(str, victims))} {what} while {moment} in step {step}")
    return names, faults


if __name__ == "__main__":
    sys.exit(main())
