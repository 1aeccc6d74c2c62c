"""Trains the quickstart's task on a colocated server, with whole steps and with partial rollouts.

    python benchmarks/partial_rollouts.py --engine vllm --python /opt/vllm/bin/python [--seeds 0 1 2]
    python benchmarks/partial_rollouts.py --table

Each run begins with the quickstart's supervised model, which is made once (runs/partial_rollouts). The file
has a line for each finished run; started again, the program goes on with the runs that the file lacks. The
table has means over seeds, with the standard error of pass@1 on the held-out problems.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lib.quickstart import CPU, LIMIT_S, QUICKSTART, make_start

RUNS = Path("runs/partial_rollouts")
RESULTS = Path("benchmarks/results/partial_rollouts_cpu.jsonl")

SETTINGS = (
    *("rollout.servers.colocated=true", "rollout.weights.transport=colocated"),
    *("rollout.servers.context_length=192", "data.eval.limit=128"),
    *("train.steps=40", "train.prompts_per_step=16", "optimizer.warmup_steps=4", "eval.every=0", "eval.n=4"),
    *("checkpoint.every=0", "checkpoint.export_hf=false", "logging.tensorboard=false"),
)
CASES = {
    "whole": (),
    "8 more, 1 step": ("rollout.over_sampling_prompts=8", "rollout.async_steps=1"),
}
SUMS = ("time/rollout", "time/training", "time/sync", "time/step")
MEANS = ("response/staleness", "response/carried", "response/length", "mismatch/kl", "train/grad_norm")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--python", default="python", help="the interpreter of the engine's environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    options = parser.parse_args()
    if not options.table:
        measure(options)
    print(table(lines(options.out)))


def measure(options: argparse.Namespace) -> None:
    """Make the runs that the file lacks, and append a line to the file for each finished run."""
    make_start(RUNS)
    if not options.out.exists():
        machine = {"machine": platform.machine(), "cores": os.cpu_count()}
        head = {"settings": SETTINGS, "cases": CASES, "engine": options.engine, "machine": machine}
        options.out.write_text(json.dumps(head) + "\n")
    done = {(line["case"], line["seed"]) for line in lines(options.out)}
    for seed in options.seeds:
        for case in CASES:
            if (case, seed) not in done:
                line = json.dumps(run(case, seed, options))
                with options.out.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()[1:]]


def train(config: str, *overrides: str | Path) -> None:
    """Train a configuration of the quickstart; the last override is the output directory."""
    *words, out = overrides
    files = [str(QUICKSTART / f"{config}.yaml"), str(CPU), f"data.train.path={RUNS}/task/data/train.jsonl"]
    command = [sys.executable, "-m", "megatron_gvpo", "train", "--overwrite", *files, *map(str, words)]
    subprocess.run([*command, f"output_dir={out}"], check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)


def run(case: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Make one run, and return its measurements."""
    out = RUNS / f"{case}-{seed}".replace(" ", "_").replace(",", "")
    engine = (f"rollout.engine={options.engine}", f"rollout.servers.python={options.python}")
    task = (
        f"model.path={RUNS}/sft/hf",
        f"data.eval.path={RUNS}/task/data/test.parquet",
        f"train.seed={seed}",
    )
    load, before = os.getloadavg()[0], processor_seconds()
    train("gvpo", *engine, *task, *SETTINGS, *CASES[case], out)
    first, *steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    line = {"case": case, "seed": seed, "load_at_start": load, "cpu_s": processor_seconds() - before}
    line |= {"pass@1 before": first["eval/pass@1"], "pass@1": steps[-1]["eval/pass@1"]}
    line |= {name: sum(step[name] for step in steps) for name in SUMS}
    line |= {name: fmean(step[name] for step in steps) for name in MEANS}
    return line | {"response/staleness_max": max(step["response/staleness_max"] for step in steps)}


def processor_seconds() -> float:
    """Seconds of all processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(measured: list[dict[str, Any]]) -> str:
    """The means over seeds."""
    rows = ["| steps | pass@1 before | pass@1 | rollout s | CPU s | late, mean (max) | carried | tokens |"]
    rows.append("|---" * 8 + "|")
    for case in CASES:
        runs = [line for line in measured if line["case"] == case]
        if not runs:
            continue

        def mean(name: str, runs: list[dict[str, Any]] = runs) -> float:
            return fmean(line[name] for line in runs)

        passed = [100 * line["pass@1"] for line in runs]
        error = f" ± {stdev(passed) / len(passed) ** 0.5:.1f}" if len(passed) > 1 else ""
        late = f"{mean('response/staleness'):.2f} ({mean('response/staleness_max'):.0f})"
        cells = [case, f"{100 * mean('pass@1 before'):.1f}", f"{fmean(passed):.1f}{error}"]
        cells += [f"{mean('time/rollout'):.0f}", f"{mean('cpu_s'):.0f}", late]
        cells += [f"{100 * mean('response/carried'):.0f} %", f"{mean('response/length'):.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
