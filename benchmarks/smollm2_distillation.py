"""Compares ways to learn from a teacher at equal processor time, on two pretrained language models.

    OMP_NUM_THREADS=1 python benchmarks/smollm2_distillation.py [--teacher runs/smollm2/hf] [--minutes M]

The teacher is SmolLM2-135M after GVPO on the sums of examples/smollm2 (`make real`). One student is
SmolLM2-135M before it; the other is Gemma 3 270M, whose tokenizer is another one. Its weights are fetched
once, under the Gemma Terms of Use. A cell is one way to learn, one student and one seed: it trains until its
steps have used `--seconds` of processor time, with one thread, and is graded on held-out sums. Loading and
grading do not count; the teacher's sampling for SeqKD does. Rewards are only reported.

A finished cell is a line of --out, and is never repeated, so that the program can be stopped and continued;
`--minutes` stops it by itself, after a cell. It prints the table of the results; `--table` does only that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from distillation import SEQKD, SFT, answer_all, module_of
from smollm2_papers import EXAMPLE, LEARNING_RATE, ROOT, percent

sys.path.insert(0, str(EXAMPLE))
WORK = Path("runs/smollm2_distillation")
SMOLLM2, GEMMA = "SmolLM2", "Gemma 3"
ON_POLICY: dict[str, dict[str, Any]] = {
    "GVPO++, alpha 0": {"recipe": "gvpo_plus_plus"},
    "GVPO++, alpha 0.5": {"recipe": "gvpo_plus_plus", "loss": {"alpha": 0.5}},
    "GVPO++, alpha 1": {"recipe": "gvpo_plus_plus", "loss": {"alpha": 1.0}},
    "opd": {"recipe": "opd"},
    "opd_full": {"recipe": "opd_full"},
}
WAYS = (*ON_POLICY, SEQKD, SFT)
CELLS = [(way, SMOLLM2) for way in WAYS]
CELLS += [(way, GEMMA) for way in WAYS if not way.startswith("opd")]  # opd refuses another tokenizer
TEACHER, BEFORE = "the teacher", "before training"
ANSWERS = WORK / "answers.jsonl"
ANSWERED = 512  # training problems that the teacher answers for SeqKD


def main() -> None:
    args = parse()
    end = time.monotonic() + 60 * args.minutes
    for way, student, seed in [] if args.table else missing(args):
        if time.monotonic() > end:
            break
        line = {"way": way, "student": student, "seed": seed, **run(way, student, seed, args)}
        with args.out.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        print(f"{way}, {student}, seed {seed}: {line['strict']:.3f} after {line['steps']} steps", flush=True)
    print(table(read(args), args.seeds))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--teacher", type=Path, default=Path("runs/smollm2/hf"), help="SmolLM2 after GVPO")
    parser.add_argument("--seconds", type=float, default=150.0, help="processor seconds of a cell (150)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no cell after this time")
    parser.add_argument("--table", action="store_true", help="run nothing: print the table of the results")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/smollm2_distillation_cpu.jsonl", metavar="FILE"
    )
    args = parser.parse_args()
    if not args.table and not (args.teacher / "config.json").is_file():
        parser.error(f"--teacher {args.teacher}: there is no model; `make real` trains it")
    return args


def read(args: argparse.Namespace) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The finished cells with this number of seconds, by way, student and seed."""
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    return {
        (line["way"], line["student"], line["seed"]): line for line in lines if line["of"] == args.seconds
    }


def missing(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """The cells to run: first the models that are only graded, then all ways, one seed after the other."""
    cells = [(TEACHER, SMOLLM2, 0), (BEFORE, SMOLLM2, 0), (BEFORE, GEMMA, 0)]
    cells += [(*cell, seed) for seed in range(args.seeds) for cell in CELLS]
    finished = read(args)
    return [cell for cell in cells if cell not in finished]


def run(way: str, student: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one cell in this process and grade it; a teacher and a model before training are only graded."""
    import torch
    import yaml
    from lib.smollm2.cells import train_and_grade

    from megatron_gvpo.settings.config import load_config

    torch.set_num_threads(1)
    overrides = overrides_of(way, student, seed, args)
    seconds = 0.0 if way in (TEACHER, BEFORE) else args.seconds
    if way == SEQKD:
        system = yaml.safe_load((EXAMPLE / "gvpo.yaml").read_text())["data"]["system_prompt"]
        seconds -= answer_all(
            args.teacher, prepare_task() / "train.jsonl", ANSWERS, 16, first=ANSWERED, system=system
        )
    steps, begin_s, spent_s = 0, time.process_time(), 0.0
    metrics_of_steps: dict[str, list[float]] = {}

    def has_used_its_time(step: int, metrics: Mapping[str, float]) -> bool:
        nonlocal steps, begin_s, spent_s
        if step == 0:
            begin_s = time.process_time()
        steps, spent_s = step, time.process_time() - begin_s
        for name in ("reward/strict", "response/length", "teacher/excluded"):
            if name in metrics:
                metrics_of_steps.setdefault(name, []).append(round(metrics[name], 4))
        return spent_s >= seconds

    load = os.getloadavg()[0]
    words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    grades = train_and_grade(load_config([EXAMPLE / "gvpo.yaml"], words), has_used_its_time)
    return {
        **grades,
        "steps": steps,
        "processor_s": round(spent_s, 1),
        "metrics": metrics_of_steps,
        "load": round(load, 1),
        "of": args.seconds,
    }


def overrides_of(way: str, student: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The keys that differ from the example's configuration."""
    task = prepare_task()
    overrides: dict[str, Any] = {
        "output_dir": str(WORK / "run"),
        "model.path": str(args.teacher if way == TEACHER else model_of(student)),
        "data.train.path": str(task / "train.jsonl"),
        "data.eval.path": str(task / "test.jsonl"),
        "train.seed": seed,
        "train.steps": 1000,
        "train.prompts_per_step": 8,
        "optimizer.lr": LEARNING_RATE,
        "optimizer.decay": "constant",
        "eval.every": 0,
        "checkpoint.every": 0,
        "checkpoint.export_hf": False,
    }
    if way in (SEQKD, SFT):
        overrides |= {"algorithm": "sft", "rollout": {"max_tokens": 16}, "train.mini_batches": 1}
        overrides |= {"train.prompts_per_step": 64, "data.train.demonstration_key": "answer"}
        if way == SEQKD:
            overrides |= {"data.train.path": str(ANSWERS)}
            overrides |= {"data.train.demonstration_key": "demonstration"}
    elif way in ON_POLICY:
        overrides |= {"teacher.path": str(args.teacher), "algorithm": ON_POLICY[way]}
    return overrides


def prepare_task() -> Path:
    # Imported by its path, because the examples have several modules of this name.
    module_of(EXAMPLE / "make_task.py").make_task(WORK / "task")
    return WORK / "task"


def model_of(student: str) -> Path:
    """Return the directory of a pretrained model in the user's cache; fetch the model if it is missing."""
    from lib.smollm2.gemma import make_gemma
    from model import cached_model, make_model

    directory = cached_model() if student == SMOLLM2 else cached_model().with_name("gemma-3-270m")
    if not directory.exists():
        (make_model if student == SMOLLM2 else make_gemma)(directory)
    return directory.resolve()


def table(results: Mapping[tuple[str, str, int], Mapping[str, Any]], seeds: int) -> str:
    """The mean and standard error over seeds of the held-out grades, in Markdown, and the cells not run."""
    lines = [
        "| student | way to learn | held out, strict | lenient | steps | seeds |",
        "|---|---|---|---|---|---|",
    ]
    absent = []
    for way, student in [(TEACHER, SMOLLM2), (BEFORE, SMOLLM2), (BEFORE, GEMMA), *CELLS]:
        cells = [line for (*cell, _), line in results.items() if cell == [way, student]]
        if cells:
            shown = " | ".join(percent([cell[key] for cell in cells]) for key in ("strict", "lenient"))
            steps = fmean(cell["steps"] for cell in cells)
            lines.append(f"| {student} | {way} | {shown} | {steps:.0f} | {len(cells)} |")
        if (way, student) in CELLS and len(cells) < seeds:
            absent.append(f"{way} with {student} ({seeds - len(cells)})")
    if absent:
        lines += ["", f"Not run, of {seeds} seeds each: {', '.join(absent)}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
