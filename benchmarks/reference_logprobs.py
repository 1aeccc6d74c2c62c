"""Compares GVPO runs whose reference is the trainer's own log-probs, or the engine's (reference_logprobs).

    python benchmarks/reference_logprobs.py [--seeds 0 1 2] [--out FILE.json] [key.sub=value ...]

It runs the quickstart's GVPO from its finished warm start (runs/quickstart/{task,sft}), once with each
setting and seed, one after the other. Every run gets the further arguments; `rollout.engine=sglang` uses a
real server. It writes pass@1 before and after, seconds by phase, and the mismatch watch's numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_gvpo.observe import read_metrics

RUNS = Path("runs/reference_logprobs")
CONFIG = ["examples/quickstart/gvpo.yaml", "examples/cpu.yaml"]
SETTINGS = ("trainer", "engine")
WATCHED = ("mismatch/abs_mean", "mismatch/kl", "mismatch/gap", "mismatch/slope", "mismatch/residual_slope")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/reference_logprobs_cpu.json"))
    options, overrides = parser.parse_known_args()
    report: dict[str, Any] = {
        "what": "the quickstart's GVPO run with algorithm.reference_logprobs=trainer and =engine; how far "
        "the engine is from the trainer is in mean_over_steps (the embedded one: by rounding only)",
        "command": f"python benchmarks/reference_logprobs.py {' '.join(sys.argv[1:])}".strip(),
        "machine": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "runs": [],
    }
    for seed in options.seeds:
        for setting in SETTINGS:
            report["runs"].append(
                {"reference_logprobs": setting, "seed": seed, **run(setting, seed, overrides)}
            )
            report["summary"] = {name: summarise(report["runs"], name) for name in SETTINGS}
            options.out.write_text(json.dumps(report, indent=2) + "\n")
            print(json.dumps(report["runs"][-1]), flush=True)
    print(json.dumps(report["summary"], indent=2))


def run(setting: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Train once and return a summary of the run's metrics."""
    out = RUNS / f"{setting}_seed{seed}"
    options = [f"output_dir={out}", f"algorithm.reference_logprobs={setting}", f"train.seed={seed}"]
    command = ["-m", "megatron_gvpo", "train", "--overwrite", *CONFIG, *options, *overrides]
    load = os.getloadavg()[0]
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    records = read_metrics(out / "metrics.jsonl")
    graded = {record["step"]: record["eval/pass@1"] for record in records if "eval/pass@1" in record}
    watched = {
        name: statistics.fmean(record[name] for record in records[1:] if record.get(name) is not None)
        for name in WATCHED
    }
    return {
        "command": " ".join(["python", *command]),
        "pass_at_1_before": summary["pass_at_1_before"],
        "pass_at_1_after": summary["pass_at_1_after"],
        "pass_at_1_by_step": graded,
        "response_length": {"first": records[1]["response/length"], "last": records[-1]["response/length"]},
        "mean_over_steps": watched,
        "seconds": summary["seconds"],
        "load_at_start": load,
    }


def summarise(runs: list[dict[str, Any]], setting: str) -> dict[str, Any]:
    """Summarise the runs of one setting over the seeds."""
    chosen = [r for r in runs if r["reference_logprobs"] == setting]
    after = [r["pass_at_1_after"] for r in chosen]
    seconds = (
        {phase: statistics.fmean(r["seconds"][phase] for r in chosen) for phase in chosen[0]["seconds"]}
        if chosen
        else {}
    )
    return {
        "seeds": len(chosen),
        "pass_at_1_after": {"mean": statistics.fmean(after), "min": min(after), "max": max(after)}
        if chosen
        else None,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
