"""Trains the quickstart's GVPO part with all weights and with adapters, from one supervised model.

    python benchmarks/adapter_curves.py [--seeds 0 1 2] [--cases whole adapters] [--out FILE]

Every run is the documented command in a process of its own with one thread, one run at a time:

    megatron-gvpo train examples/quickstart/gvpo.yaml examples/cpu.yaml [examples/lora.yaml] train.seed=SEED

The task and the supervised model are the quickstart's, and are made once, in runs/adapter_curves. The file
gets each run as it ends, with its held-out pass@1 at every evaluation. Started again, the program goes on
with the runs that the file lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lib.quickstart import CPU, QUICKSTART, ROOT, commit, make_start, python

from megatron_gvpo.core.json_files import read_metrics

RUNS = Path("runs/adapter_curves")
LORA = str(ROOT / "examples" / "lora.yaml")
CASES = {
    "whole": [],
    "adapters": [LORA],
    "adapters, lr 1e-4": [LORA, "optimizer.lr=1.0e-4"],  # the whole model's rate
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["whole", "adapters"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/lora_quickstart_cpu.json")
    options = parser.parse_args()
    make_start(RUNS)
    report = json.loads(options.out.read_text()) if options.out.exists() else begin()
    done = {(run["case"], run["seed"]) for run in report["runs"]}
    for seed in options.seeds:
        for case in options.cases:
            if (case, seed) not in done:
                report["runs"].append(result := run(case, seed))
                options.out.write_text(json.dumps(report, indent=1) + "\n")
                print(json.dumps(result), flush=True)


def begin() -> dict[str, Any]:
    return {
        "what": "held-out pass@1 of the quickstart's GVPO part: all weights train, or adapters",
        "command": "OMP_NUM_THREADS=1 python benchmarks/adapter_curves.py",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "runs": [],
    }


def run(case: str, seed: int) -> dict[str, Any]:
    """Train once, and return the run's line of the file."""
    out = RUNS / f"{case}-{seed}".replace(", ", "_").replace(" ", "_")
    paths = [
        f"output_dir={out}",
        f"model.path={RUNS / 'sft' / 'hf'}",
        f"data.train.path={RUNS / 'task' / 'data' / 'train.jsonl'}",
        f"data.eval.path={RUNS / 'task' / 'data' / 'test.parquet'}",
    ]
    load, start = os.getloadavg()[0], time.perf_counter()
    overrides = [*configuration("gvpo.yaml"), *CASES[case], f"train.seed={seed}"]
    python(["-m", "megatron_gvpo", "train", "--overwrite", *overrides, *paths])
    records = read_metrics(out / "metrics.jsonl")
    settings = [str(Path(part).relative_to(ROOT)) if part.startswith("/") else part for part in overrides]
    return {
        "case": case,
        "seed": seed,
        "command": f"megatron-gvpo train {' '.join(settings)}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
        "seconds": round(time.perf_counter() - start),
        "pass_at_1": {r["step"]: round(r["eval/pass@1"], 4) for r in records if "eval/pass@1" in r},
        "reward": [round(r["reward/mean"], 3) for r in records if "reward/mean" in r],
        "mismatch_kl_max": max(r["mismatch/kl"] for r in records if "mismatch/kl" in r),
    }


def configuration(name: str) -> list[str]:
    return [str(QUICKSTART / name), str(CPU)]


if __name__ == "__main__":
    main()
