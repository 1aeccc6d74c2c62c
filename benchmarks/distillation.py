"""Compares ways to learn from a teacher at equal processor time, on the quickstart's sums.

    python benchmarks/distillation.py [--seeds 0 1 2] [--cases CASE ...] [--seconds 12] [--out FILE]

A student of 0.8 M parameters, which was fine-tuned on demonstrations that show their work in half of the
cases, learns from one of two teachers, which always show it: `same` has the student's tokenizer, with one
token for a character, and `other` has other ids for these. Every case trains until its steps have used
`--seconds` of processor time, with one thread. Loading and evaluations do not count; the teacher's sampling
for SeqKD does. Rewards are only reported.

The models are made once, in runs/distillation. The file gets each run as it ends, with its held-out pass@1 by
processor seconds. Started again, the program goes on with the runs that the file lacks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import time
from datetime import UTC, datetime
from itertools import batched
from pathlib import Path
from typing import Any

from lib.quickstart import CPU, ROOT, commit, python

RUNS = Path("runs/distillation")
DISTILL = ROOT / "examples" / "distill"
ON_POLICY = {
    "GVPO++, alpha 0": ["algorithm=gvpo_plus_plus"],
    "GVPO++, alpha 0.5": ["algorithm=gvpo_plus_plus", "algorithm.loss.alpha=0.5"],
    "GVPO++, alpha 1": ["algorithm=gvpo_plus_plus", "algorithm.loss.alpha=1"],
    "opd": ["algorithm=opd"],
    "opd_full": ["algorithm=opd_full", "optimizer.lr=2.0e-4"],  # as in examples/distill
}
METRICS = {"teacher/excluded", "teacher/length_ratio", "reward/math", "train/log_ratio"}
SEQKD, SFT = "SeqKD", "SFT on the data"
CASES = [  # opd and opd_full refuse the teacher `other`
    ("GVPO++, alpha 0", "same"),
    ("GVPO++, alpha 0", "other"),
    ("opd", "same"),
    (SFT, "none"),
    (SEQKD, "other"),
    ("opd_full", "same"),
    ("GVPO++, alpha 0.5", "other"),
    ("GVPO++, alpha 1", "other"),
    (SEQKD, "same"),
    ("GVPO++, alpha 0.5", "same"),
    ("GVPO++, alpha 1", "same"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [f"{case}/{teacher}" for case, teacher in CASES]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/distillation_cpu.json")
    options = parser.parse_args()
    report = json.loads(options.out.read_text()) if options.out.exists() else begin(options.seconds)
    make_models(report, options.out)
    done = {(run["case"], run["teacher"], run["seed"]) for run in report["runs"]}
    for seed in options.seeds:
        for case, teacher in CASES:
            if (case, teacher, seed) not in done and f"{case}/{teacher}" in options.cases:
                report["runs"].append(result := run(case, teacher, seed, report["seconds"]))
                save(report, options.out)
                print(json.dumps(result), flush=True)
    print(table(report))


def begin(seconds: float) -> dict[str, Any]:
    return {
        "what": "held-out pass@1 of a student by processor seconds of training, by way to learn and teacher",
        "command": "OMP_NUM_THREADS=1 python benchmarks/distillation.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores beside other work",
        "seconds": seconds,
        "models": {},
        "runs": [],
    }


def table(report: dict[str, Any]) -> str:
    """Pass@1 of each seed at the first evaluation after its processor seconds were used, in Markdown."""
    lines = [
        "| way to learn | teacher | seeds | steps | pass@1 | best on the way |",
        "|---|---|---|---|---|---|",
    ]
    for case, teacher in CASES:
        curves = [
            run["step_seconds_pass_at_1"]
            for run in report["runs"]
            if (run["case"], run["teacher"]) == (case, teacher)
        ]
        if curves:
            last, best = (
                " ".join(f"{value:.1%}" for value in values)
                for values in ([c[-1][2] for c in curves], [max(row[2] for row in c) for c in curves])
            )
            steps = " ".join(str(curve[-1][0]) for curve in curves)
            lines.append(f"| {case} | {teacher} | {len(curves)} | {steps} | {last} | {best} |")
    return "\n".join(lines)


def save(report: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(report, indent=1) + "\n")


# --- the student, the teachers, and the teachers' responses -------------------------------------------------


def make_models(report: dict[str, Any], out: Path) -> None:
    """Make the data, the three models and the teachers' answers, unless they exist."""
    if not (RUNS / "task" / "data").is_dir():
        make_task()
    for name, key, steps in (
        ("student", "demonstration", 120),
        ("same", "solution", 120),
        ("other", "solution", 120),
    ):
        if (RUNS / name / "hf" / "config.json").exists():
            continue
        model = RUNS / "task" / ("other" if name == "other" else "student")
        overrides = [f"output_dir={RUNS / name}", f"model.path={model}", f"train.steps={steps}"]
        overrides += [f"data.train.path={RUNS}/task/data/train.jsonl", f"data.train.demonstration_key={key}"]
        overrides += [f"data.eval.path={RUNS}/task/data/test.parquet", "rewards.components=[{name: math}]"]
        files = [str(DISTILL / "sft.yaml"), str(CPU)]
        command = ["-m", "megatron_gvpo", "train", "--resume=auto", *files, *overrides, "eval.every=40"]
        python([*command, "checkpoint.every=40"])
    for name in ("student", "same", "other"):
        if name not in report["models"]:
            lines = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
            report["models"][name] = {
                line["step"]: round(line["eval/pass@1"], 4) for line in lines if "eval/pass@1" in line
            }
    for name in ("same", "other"):
        answers_of(name)
    save(report, out)


def make_task() -> None:
    quickstart = module_of(ROOT / "examples" / "quickstart" / "make_task.py")
    quickstart.LEVELS = {1: quickstart.Level(share=1.0, operands=4)}
    quickstart.WORKED = 0.5
    quickstart.SIZES = {"train": 2048, "validation": 64, "test": 256}
    quickstart.make_model(RUNS / "task" / "student", 0)
    quickstart.make_data(RUNS / "task" / "data", 0)
    # Another tokenizer: other ids for the characters. Its tokens of an operator with a digit are never used,
    # because Qwen2's pre-tokenizer parts the two.
    quickstart.TOKENS = [quickstart.END, *"=*-+9876543210}", quickstart.NEWLINE, quickstart.SPACE]
    quickstart.TOKENS += [quickstart.BOXED, quickstart.PAD]
    merges = [(operator, digit) for operator in "+-=" for digit in "0123456789"]
    quickstart.TOKENS += ["".join(pair) for pair in merges]
    directory = RUNS / "task" / "other"
    quickstart.make_model(directory, 1)
    tokenizer = quickstart.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(quickstart.TOKENS)},
        merges=merges,
        pad_token=quickstart.PAD,
        eos_token=quickstart.END,
        unk_token=None,
    )
    tokenizer.add_tokens(quickstart.BOXED)
    tokenizer.save_pretrained(directory)


def module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers_of(name: str) -> tuple[Path, float]:
    """Return the file of the teacher's responses to all training prompts, and their processor seconds."""
    file = RUNS / f"{name}_answers.jsonl"
    return file, answer_all(RUNS / name / "hf", RUNS / "task/data/train.jsonl", file, max_tokens=32)


def answer_all(
    teacher: Path,
    problems: Path,
    answers: Path,
    max_tokens: int,
    first: int | None = None,
    system: str | None = None,
) -> float:
    """Write the teacher's sampled responses to `answers`, once; return their processor seconds.

    `problems`: a file of records with prompts, of which the `first` are used. With a `system` prompt each is
    a chat.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (seconds := answers.with_suffix(".seconds")).exists():
        return float(seconds.read_text())
    begin_s = time.process_time()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(teacher, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    lines = []
    for part in batched(map(json.loads, problems.read_text().splitlines()[:first]), 128):
        prompts = [record["prompt"] for record in part]
        if system is not None:
            chats = [
                [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
                for prompt in prompts
            ]
            prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        encoded = tokenizer(prompts, padding=True, add_special_tokens=False, return_tensors="pt")
        encoded.pop("token_type_ids", None)
        ids = model.generate(**encoded, do_sample=True, top_k=0, max_new_tokens=max_tokens)
        texts = tokenizer.batch_decode(ids[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        lines += [
            json.dumps({**record, "demonstration": text}) + "\n"
            for record, text in zip(part, texts, strict=True)
            if text
        ]
    answers.write_text("".join(lines))
    seconds.write_text(f"{time.process_time() - begin_s:.1f}")
    return float(seconds.read_text())


# --- the runs -----------------------------------------------------------------------------------------------


def run(case: str, teacher: str, seed: int, seconds: float) -> dict[str, Any]:
    """Train once, and return the run's line of the file."""
    out = RUNS / f"{case}-{teacher}-{seed}".replace(", ", "_").replace(" ", "_")
    supervised = case in (SEQKD, SFT)
    overrides = [
        str(DISTILL / ("sft.yaml" if supervised else "rewards.yaml")),
        str(CPU),
    ]
    overrides += [f"output_dir={out}", f"model.path={RUNS}/student/hf", f"train.seed={seed}"]
    overrides += [f"data.eval.path={RUNS}/task/data/test.parquet", "eval.n=1", "checkpoint.export_hf=false"]
    overrides += ["optimizer.decay=constant", "optimizer.warmup_steps=4", "train.steps=1000"]
    overrides += ["rewards.components=[{name: math}]", "eval.sampling.max_tokens=32"]
    if supervised:
        answers, spent = answers_of(teacher) if case == SEQKD else (RUNS / "task/data/train.jsonl", 0.0)
        seconds -= spent
        overrides += [f"data.train.path={answers}", "optimizer.lr=3.0e-4", "optimizer.min_lr=0"]
        overrides += ["eval.every=12"]
    else:
        overrides += [f"data.train.path={RUNS}/task/data/train.jsonl", "rollout.max_tokens=32"]
        overrides += [
            f"teacher.path={RUNS}/{teacher}/hf",
            "eval.every=8",
            "train.prompts_per_step=8",
            *ON_POLICY[case],
        ]
    load = os.getloadavg()[0]
    result = train_within(overrides, seconds)
    settings = [part.replace(f"{ROOT}/", "") for part in overrides]
    return {
        "case": case,
        "teacher": teacher,
        "seed": seed,
        "settings": " ".join(settings),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
        **result,
    }


def train_within(overrides: list[str], seconds: float) -> dict[str, Any]:
    """Train for so many processor seconds of steps; return the curve and some metrics by step."""
    import torch

    from megatron_gvpo.settings.config import load_config
    from megatron_gvpo.training.callbacks import Recorder
    from megatron_gvpo.training.trainer import Trainer

    torch.set_num_threads(1)
    files = [part for part in overrides if part.endswith(".yaml")]
    config = load_config(files, [part for part in overrides if not part.endswith(".yaml")])

    class Timed(Trainer):
        """A trainer that counts the processor seconds of its evaluations, and stops when its time is used."""

        evaluating_s = begin_s = 0.0

        def evaluate(self) -> dict[str, float]:
            begin_s = time.process_time()
            metrics = super().evaluate()
            self.evaluating_s += time.process_time() - begin_s
            return metrics

        def notify(self, event: str, *arguments: Any) -> None:
            super().notify(event, *arguments)
            if event == "on_step":
                self.note(*arguments)

        def note(self, step: int, metrics: dict[str, float]) -> None:
            if step == 0:
                self.begin_s = time.process_time() - self.evaluating_s
            spent = time.process_time() - self.evaluating_s - self.begin_s
            for name in METRICS & metrics.keys():
                own_metrics.setdefault(name, []).append(round(metrics[name], 4))
            if "eval/pass@1" in metrics:
                curve.append([step, round(spent, 2), round(metrics["eval/pass@1"], 4)])
                if spent >= seconds:
                    self.stop("the processor seconds are used")

    curve: list[list[float]] = []
    own_metrics: dict[str, list[float]] = {}
    trainer = Timed(config, [Recorder()], overwrite=True)
    trainer.fit()
    trainer.close()
    return {"step_seconds_pass_at_1": curve, "metrics": own_metrics}


if __name__ == "__main__":
    main()
