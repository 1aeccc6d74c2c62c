"""Measures the seconds that commands take, and those to the quickstart's first step: medians of five runs.

    python benchmarks/startup.py [--out benchmarks/results/startup_cpu.json]

The result has the wall time, and the processor time of the command and its children, because other work on
the machine makes the wall time longer. The load (runnable processes, by the kernel's one-minute average) is
recorded for each run. The quickstart's first step is that of its first training command, SFT, with the
evaluation before it; it is measured from that command, and from the program that makes the task before it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from megatron_gvpo.core.json_files import read_metrics

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
PLAN = "plan --model Qwen/Qwen2.5-7B --gpus 16 --gpu h800 --k 5 --prompts 1024 --response-length 850,p95=2000"
WANTED = {  # wall seconds
    "--help": 0.7,
    "recipes": 0.7,
    "recipes show gvpo": 2.0,
    PLAN: 2.0,
    "doctor": 3.0,
}
FIRST_STEP = 10.0


def measure(command: list[str], runs: int, environment: dict[str, str]) -> dict[str, Any]:
    """Return the wall and processor seconds of so many runs, and the load before each."""
    walls, processor, load = [], [], []
    for _ in range(runs):
        load.append(os.getloadavg()[0])
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        walls.append(time.perf_counter() - begin)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return _summary(walls, processor, load)


def first_step(runs: int, directory: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Return the seconds from the quickstart's first training command (SFT) to its first step's record."""
    make = [
        sys.executable,
        str(QUICKSTART / "make_task.py"),
        "--out",
        str(directory / "runs/quickstart/task"),
    ]
    subprocess.run(make, check=True, capture_output=True, env=environment)
    files = [str(QUICKSTART / "sft.yaml"), str(ROOT / "examples" / "cpu.yaml")]
    command = [sys.executable, "-m", "megatron_gvpo", "train", *files, "--overwrite"]
    return _first_step(command, runs, directory, environment)


def whole_first_step(runs: int, directory: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Return the seconds from the start of `make quickstart`'s program to the record of the first step."""
    return _first_step([sys.executable, str(QUICKSTART / "run.py")], runs, directory, environment)


def _first_step(
    command: list[str], runs: int, directory: Path, environment: dict[str, str]
) -> dict[str, Any]:
    walls, processor, load, steps = [], [], [], []
    for _ in range(runs):
        metrics = directory / "runs" / "quickstart" / "sft" / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        load.append(os.getloadavg()[0])
        begin = time.perf_counter()
        with subprocess.Popen(
            command, cwd=directory, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        ) as run:
            while not (metrics.exists() and (last := read_metrics(metrics)) and last[-1]["step"] >= 1):
                if run.poll() is not None:
                    raise SystemExit(f"{command} ended with {run.returncode} before its first step")
                time.sleep(0.02)
            walls.append(time.perf_counter() - begin)
            program = psutil.Process(run.pid)
            used = [process.cpu_times() for process in (program, *program.children(recursive=True))]
            ended = used[0].children_user + used[0].children_system  # the seconds of make_task.py
            processor.append(sum(times.user + times.system for times in used) + ended)
            steps.append(last[-1]["time/step"])
            os.killpg(run.pid, signal.SIGKILL)
    return _summary(walls, processor, load) | {"median_seconds_of_the_step": statistics.median(steps)}


def _summary(walls: list[float], processor: list[float], load: list[float]) -> dict[str, Any]:
    return {
        "median_seconds": round(statistics.median(walls), 3),
        "median_processor_seconds": round(statistics.median(processor), 3),
        "seconds": [round(wall, 3) for wall in walls],
        "load": [round(value, 1) for value in load],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "startup_cpu.json")
    options = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    report: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count(), "commands": {}}
    for arguments, wanted in WANTED.items():
        command = [sys.executable, "-m", "megatron_gvpo", *arguments.split()]
        report["commands"][arguments] = {"wanted": wanted, **measure(command, options.runs, environment)}
        _print(arguments, report["commands"][arguments])
    with tempfile.TemporaryDirectory() as directory:
        for name, steps in (
            ("first step of the quickstart", first_step),
            ("first step, with the making of the task", whole_first_step),
        ):
            measured = steps(options.runs, Path(directory), environment)
            report["commands"][name] = {"wanted": FIRST_STEP, **measured}
            _print(name, report["commands"][name])
    options.out.write_text(json.dumps(report, indent=2) + "\n")


def _print(name: str, result: dict[str, Any]) -> None:
    print(
        f"{name[:40]:<40} {result['median_seconds']:7.2f} s, of the processor "
        f"{result['median_processor_seconds']:6.2f} s, wanted {result['wanted']:g} s, "
        f"load {statistics.median(result['load']):.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
