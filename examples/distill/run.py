"""Runs on-policy distillation: a small model learns from a larger one and, to compare, from rewards alone.

    python examples/distill/run.py [key.sub=value ...]

The arguments go to the three runs that are compared. They start from the same student and sample as many
responses in a step. One learns the teacher's log-probs of its responses (opd), one the teacher's whole
distribution at each of their tokens (opd_full), and one their rewards. A step without a teacher is cheaper,
so the last takes more steps.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE, RUN = Path(__file__).parent, Path("runs/distill")


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    spent: dict[str, dict[str, float]] = {}

    def run(title: str, *command: str) -> None:
        print(f"\n== {title}: {' '.join(command)}", flush=True)
        start, before = time.perf_counter(), processor_seconds()
        subprocess.run([sys.executable, *command], check=True)
        seconds = {"seconds": time.perf_counter() - start, "processor_seconds": processor_seconds() - before}
        spent[title] = {name: round(value, 1) for name, value in seconds.items()}

    def train(title: str, files: list[str], *overrides: str) -> None:
        paths = [str(HERE / name) for name in [*files, "../cpu.yaml"]]
        run(title, "-m", "megatron_gvpo", "train", "--overwrite", *paths, *overrides)

    run("make the task", str(HERE / "make_task.py"), "--out", str(RUN / "task"))
    train("student: SFT", ["sft.yaml"])
    train("teacher: SFT", ["sft.yaml", "teacher_sft.yaml"])
    train("teacher: rewards", ["rewards.yaml", "teacher_rewards.yaml"])
    train("student: opd", ["rewards.yaml", "opd.yaml"], *sys.argv[1:])
    train("student: opd_full", ["rewards.yaml", "opd.yaml", "opd_full.yaml"], *sys.argv[1:])
    train("student: rewards", ["rewards.yaml"], *sys.argv[1:])

    curves = {
        name: evaluations(RUN / name / "metrics.jsonl") for name in ("teacher", "opd", "opd_full", "rewards")
    }
    result = {"held_out_pass_at_1": curves, "spent": spent, "load_average_at_the_end": os.getloadavg()}
    (RUN / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\nheld-out pass@1 by step")
    for name, curve in curves.items():
        print(f"{name:8}  " + "  ".join(f"{step}: {value:.1%}" for step, value in curve.items()))
    for title, costs in spent.items():
        print(f"{title:16}  {costs['seconds']:6.0f} s, of processors {costs['processor_seconds']:6.0f} s")
    return 0


def evaluations(metrics: Path) -> dict[int, float]:
    """Return the pass@1 of each evaluation, by step."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: line["eval/pass@1"] for line in lines if "eval/pass@1" in line}


def processor_seconds() -> float:
    """Processor seconds of the commands so far, of all cores together."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"distill stopped: `{' '.join(error.cmd[1:])}` ended with {error.returncode}")
