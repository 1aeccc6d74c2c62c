"""Compares GRPO on SmolLM2-135M by TRL's GRPOTrainer and by this trainer: learning, time and memory.

Both sides train the model of examples/smollm2 on its sums: 16 problems x 8 responses of at most 16 tokens and
one update a step, in the same order of problems, with the same loss, learning rate and optimizer, in fp32, in
one process of one thread, after one another. They differ in their random numbers, so the curves are compared
as means over seeds. TRL gets no gradient checkpointing, no reference model, micro-batches of `--trl-batch`.

A finished side of a seed is in the file, and is not repeated: a stopped comparison goes on. TRL is in an
environment that step_vs_trl.py makes.

    python benchmarks/smollm2_vs_trl.py --seeds 0 1 2 --out benchmarks/results/smollm2_vs_trl_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from step_vs_trl import machine, make_environment

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "smollm2"
SIDES = ROOT / "benchmarks" / "lib" / "smollm2" / "sides.py"
NAMES = ("trl", "ours")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--trl-batch", type=int, default=32, help="TRL's per_device_train_batch_size (32)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = {"steps": args.steps, "trl_batch": args.trl_batch}
    results: dict[str, Any] = {"machine": machine(), **settings, "runs": {}}
    if args.out.exists():
        runs = json.loads(args.out.read_text())["runs"]
        results["runs"] = {name: run for name, run in runs.items() if len(run["steps"]) == args.steps}
    pythons = {"trl": str(make_environment()), "ours": sys.executable}
    for seed in args.seeds:
        for side in NAMES:
            if f"{side} {seed}" not in results["runs"]:
                load = round(os.getloadavg()[0], 1)
                lines = run(side, pythons[side], seed, args)
                results["runs"][f"{side} {seed}"] = {"load": load, "steps": lines}
                print(f"{side}, seed {seed}, load {load}: {in_short(lines)}", flush=True)
                results["summary"] = summary(results["runs"])
                args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["summary"], indent=1))


def run(side: str, python: str, seed: int, args: argparse.Namespace) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        make = [sys.executable, str(EXAMPLE / "make_task.py"), "--out", str(work / "task")]
        subprocess.run(make, check=True)
        subprocess.run([sys.executable, str(EXAMPLE / "model.py")], check=True, stdout=subprocess.DEVNULL)
        options = ["--task", str(work / "task" / "train.jsonl"), "--model", str(cached_model())]
        options += ["--work", str(work / "run"), "--out", str(work / "steps"), "--seed", str(seed)]
        options += ["--steps", str(args.steps), "--trl-batch", str(args.trl_batch)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [python, str(SIDES), side, *options], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{side} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return [json.loads(line) for line in (work / "steps").read_text().splitlines()]


def cached_model() -> Path:
    sys.path.insert(0, str(EXAMPLE))
    from model import cached_model

    return cached_model().resolve()


def in_short(lines: Sequence[dict[str, float]]) -> str:
    processor = sum(line["processor"] for line in lines)
    last = fmean(line["reward"] for line in lines[-4:])
    memory = lines[-1]["peak_gib"]
    return f"{last:.0%} right in the last four steps, {processor:.0f} s of a processor, {memory:.1f} GiB"


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """Per side: mean curve with its standard error over seeds, seconds a step, memory; and their ratios."""
    sides: dict[str, Any] = {}
    for side in NAMES:
        curves = [run["steps"] for name, run in runs.items() if name.startswith(f"{side} ")]
        if not curves:
            return {}
        by_step = [[line["reward"] for line in lines] for lines in zip(*curves, strict=True)]
        sides[side] = {
            "reward": [round(fmean(values), 3) for values in by_step],
            "standard_error": [standard_error(values) for values in by_step],
            "last_four": [round(fmean(line["reward"] for line in curve[-4:]), 3) for curve in curves],
            "processor_s": round(median(line["processor"] for curve in curves for line in curve), 2),
            "clock_s": round(median(line["clock"] for curve in curves for line in curve), 2),
            "peak_gib": round(max(line["peak_gib"] for curve in curves for line in curve), 2),
        }
    figures = ("processor_s", "clock_s", "peak_gib")
    ratios = {name: round(sides["trl"][name] / sides["ours"][name], 2) for name in figures}
    return {**sides, "trl_over_ours": ratios}


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean, or None for a single value."""
    return round(stdev(values) / len(values) ** 0.5, 3) if len(values) > 1 else None


if __name__ == "__main__":
    main()
