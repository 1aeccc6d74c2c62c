"""Trains a small task on a colocated server, with whole steps and with partial rollouts.

    python benchmarks/partial_rollouts.py --engine vllm --python /opt/vllm/bin/python [--seeds 0 1 2]
    python benchmarks/partial_rollouts.py --task smollm2 --engine vllm --python /opt/vllm/bin/python
    python benchmarks/partial_rollouts.py [--task smollm2] --table

The task is the quickstart's, whose supervised model is made once (runs/partial_rollouts), or the sums of
examples/smollm2 with SmolLM2-135M, a pretrained model, which is fetched once. The result has a line for each
finished run; started again, the program goes on with the runs that it lacks. The table has means over seeds,
with the standard error of pass@1 on the held-out problems.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lib.quickstart import CPU, LIMIT_S, QUICKSTART, ROOT, make_start, python

RUNS = Path("runs/partial_rollouts")
SMOLLM2 = ROOT / "examples" / "smollm2"

SETTINGS = (
    *("rollout.servers.colocated=true", "rollout.weights.transport=colocated", "rollout.n=8"),
    *("eval.every=0", "checkpoint.every=0", "checkpoint.export_hf=false", "logging.tensorboard=false"),
)
CASES = {
    "whole": (),
    "8 more, 1 step": ("rollout.over_sampling_prompts=8", "rollout.async_steps=1"),
}


@dataclass(frozen=True)
class Task:
    """The training: files of a configuration, changes to it, and the file of its results."""

    files: tuple[Path, ...]
    settings: tuple[str, ...]
    results: str
    prepare: Callable[[], None]  # makes the model and the problems, unless they are there


def quickstart() -> Task:
    settings = (
        *(f"model.path={RUNS}/sft/hf", f"data.train.path={RUNS}/task/data/train.jsonl"),
        *(f"data.eval.path={RUNS}/task/data/test.parquet", "rollout.servers.context_length=192"),
        *("data.eval.limit=128", "eval.n=4", "train.steps=40", "train.prompts_per_step=16"),
        "optimizer.warmup_steps=4",
    )
    files = (QUICKSTART / "gvpo.yaml", CPU)
    return Task(files, settings, "partial_rollouts_cpu.jsonl", lambda: make_start(RUNS))


def smollm2() -> Task:
    sys.path.insert(0, str(SMOLLM2))
    from model import cached_model

    def prepare() -> None:
        python([str(SMOLLM2 / "model.py")])
        python([str(SMOLLM2 / "make_task.py"), "--out", str(RUNS / "smollm2")])

    settings = (
        *(f"model.path={cached_model()}", f"data.train.path={RUNS}/smollm2/train.jsonl"),
        *(f"data.eval.path={RUNS}/smollm2/test.jsonl", "rollout.servers.context_length=256"),
        *("train.steps=12", "train.mini_batches=1", "algorithm.reference_logprobs=trainer"),
    )
    return Task((SMOLLM2 / "gvpo.yaml",), settings, "partial_rollouts_smollm2_cpu.jsonl", prepare)


TASKS = {"quickstart": quickstart, "smollm2": smollm2}
SUMS = ("time/rollout", "time/training", "time/sync", "time/step")
MEANS = ("response/staleness", "response/carried", "response/length", "mismatch/kl", "train/grad_norm")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--task", choices=TASKS, default="quickstart")
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--python", default="python", help="the interpreter of the engine's environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="the file of results (in benchmarks/results)")
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    options = parser.parse_args()
    task = TASKS[options.task]()
    out = options.out or ROOT / "benchmarks" / "results" / task.results
    if not options.table:
        measure(task, out, options)
    print(table(lines(out)))


def measure(task: Task, out: Path, options: argparse.Namespace) -> None:
    """Make the runs that the file lacks, and append a line to the file for each finished run."""
    task.prepare()
    if not out.exists():
        machine = {"machine": platform.machine(), "cores": os.cpu_count()}
        settings = [word for word in (*SETTINGS, *task.settings) if not word.startswith("model.path")]
        head = {"settings": settings, "cases": CASES, "engine": options.engine, "machine": machine}
        out.write_text(json.dumps(head) + "\n")
    done = {(line["case"], line["seed"]) for line in lines(out)}
    for seed in options.seeds:
        for case in CASES:
            if (case, seed) not in done:
                line = json.dumps(run(task, case, seed, options))
                with out.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()[1:]]


def run(task: Task, case: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Make one run, and return its measurements."""
    out = RUNS / f"{options.task}-{case}-{seed}".replace(" ", "_").replace(",", "")
    engine = (f"rollout.engine={options.engine}", f"rollout.servers.python={options.python}")
    words = (*map(str, task.files), *engine, *SETTINGS, *task.settings, *CASES[case])
    command = [sys.executable, "-m", "megatron_gvpo", "train", "--overwrite", *words]
    load, before = os.getloadavg()[0], processor_seconds()
    subprocess.run(
        [*command, f"train.seed={seed}", f"output_dir={out}"],
        check=True,
        timeout=LIMIT_S,
        stdout=subprocess.DEVNULL,
    )
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
