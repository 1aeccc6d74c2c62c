"""Repeats GVPO's Table 2 and Figures 2 to 4, and GPG's Table 15, on two small tasks, with error bars.

    python benchmarks/paper_tables.py --out benchmarks/results/paper_tables --work /tmp/paper_tables

The task `tabular` is a table of logits (parts/tabular.py). The task `quickstart` is the 0.8 M model on
arithmetic problems, by whole runs of the trainer from one SFT warm start (examples/quickstart). All rows of a
table have the same settings, except the one that the table varies: no method is tuned. A cell is one row with
one seed.
A finished cell is a line of runs.jsonl, and is never repeated; the warm start stays in --work. So the program
can be stopped and continued, `--minutes` stops it by itself, and several processes may run at once on
different --tasks, --tables or seeds (--only). tables.md lists the missing cells.

Each claim of a paper is judged by the difference of two means and its standard error: "agrees" above two
standard errors, "contradicts" below minus two, else "not separated". These tasks are some thousand times
smaller than the papers'. They can show a mechanism, not a score.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from lib import tabular

from megatron_gvpo.algorithms.config import AlgorithmConfig

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"


class Variant(NamedTuple):
    """One row of a table: an algorithm, the policy's responses a prompt, the number of prompts."""

    algorithm: dict[str, Any]
    n: int = 8
    prompts: int | None = None  # of the quickstart task; default: so many that no prompt repeats


def gvpo(n: int = 8, recipe: str = "gvpo", **loss: Any) -> Variant:
    return Variant({"recipe": recipe, **({"loss": loss} if loss else {})}, n)


def mixed(new: int, earlier: int) -> Variant:
    """Use each prompt five times in a run, because earlier responses are mixed in only for their prompt."""
    if not earlier:
        return Variant({"recipe": "gvpo"}, new, 256)
    members = [{"name": "replay", "count": earlier}]
    return Variant({"recipe": "gvpo_history", "members": members}, new, 256)


TABLES: dict[str, dict[str, Variant]] = {
    "GVPO Table 2: terms": {
        "GVPO": gvpo(),
        "- Var": gvpo(recipe="gvpo_minus_var"),
        "- Cov": gvpo(recipe="gvpo_minus_cov"),
        "- Var - Cov": gvpo(recipe="gvpo_minus_var_cov"),
        "- Var + Entropy": gvpo(recipe="gvpo_entropy"),
    },
    "GVPO Figure 2: beta": {str(beta): gvpo(beta=beta) for beta in (0.01, 0.03, 0.1, 0.3, 1.0)},
    "GVPO Figure 3: k": {str(k): gvpo(k) for k in (2, 4, 8, 16)},
    "GVPO Figure 4: history": {
        "0:8": mixed(8, 0),
        "2:6": mixed(6, 2),
        "4:4": mixed(4, 4),
        "6:2": mixed(2, 6),
    },
    "GPG Table 15": {
        "GRPO": Variant({"recipe": "grpo"}),
        "A: PG, group std": Variant({"recipe": "gpg_a"}),
        "B: F = 1": Variant({"recipe": "gpg_b"}),
        "C: + AGE": Variant({"recipe": "gpg_c"}),
        "D: + threshold": Variant({"recipe": "gpg"}),
        "group std + AGE": Variant({"recipe": "gpg_std_age"}),
    },
}
CLAIMS = {  # table: [(better row, worse row)] according to the papers
    "GVPO Table 2: terms": [("GVPO", name) for name in ("- Var", "- Cov", "- Var - Cov", "- Var + Entropy")],
    "GVPO Figure 3: k": [("4", "2"), ("8", "4"), ("16", "8")],
    "GPG Table 15": [
        ("C: + AGE", "B: F = 1"),
        ("D: + threshold", "C: + AGE"),
        ("D: + threshold", "GRPO"),
        ("A: PG, group std", "B: F = 1"),
        ("C: + AGE", "group std + AGE"),
    ],
}
TABULAR_STEPS = 300
FLAT = ("GVPO Figure 2: beta", "GVPO Figure 4: history")  # figures of the paper without large differences


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "runs.jsonl"
    end = time.monotonic() + 60 * args.minutes
    for task, table, name, seed in grid(args):
        key = f"{task} | {table} | {name} | {seed}"
        if key in read(file, args) or time.monotonic() > end:
            continue
        begin = time.perf_counter()
        variant = TABLES[table][name]
        if (result := elsewhere(variant, task, seed, read(file, args))) is None:
            result = on_table(variant, seed) if task == "tabular" else on_model(variant, seed, args)
        line = {"cell": key, **result, "seconds": time.perf_counter() - begin, "of": settings_of(task, args)}
        with file.open("a") as runs:
            runs.write(json.dumps(line) + "\n")
        print(f"{key}: {result['reward']:.3f}", flush=True)
    done = read(file, args)
    (args.out / "tables.md").write_text(report(done, args))
    plot(done, args)


def elsewhere(variant: Variant, task: str, seed: int, done: dict[str, Any]) -> dict[str, float] | None:
    """Return another table's result for this algorithm and seed; GVPO's defaults are in several tables."""
    for table, rows in TABLES.items():
        for name, other in rows.items():
            line = done.get(f"{task} | {table} | {name} | {seed}")
            if line and effective(other, task) == effective(variant, task):
                return {name: line[name] for name in ("reward", "start", "responses") if name in line}
    return None


def effective(variant: Variant, task: str) -> tuple[Any, ...]:
    algorithm = AlgorithmConfig.model_validate(variant.algorithm).model_dump(exclude={"recipe"})
    return algorithm, variant.n, task == "quickstart" and variant.prompts


def settings_of(task: str, args: argparse.Namespace) -> dict[str, int]:
    """Return the settings that all cells of a task share; results under other settings do not count."""
    if task == "tabular":
        return {"steps": TABULAR_STEPS}
    return {"steps": args.steps, "prompts": args.prompts, "sft_steps": args.sft_steps}


def read(file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the finished cells with these settings."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {
        line["cell"]: line for line in lines if line["of"] == settings_of(line["cell"].split(" | ")[0], args)
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of runs.jsonl, tables.md, plots")
    parser.add_argument("--work", type=Path, help="directory of the model, its warm start and a run's files")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no cell after this time")
    parser.add_argument(
        "--only", nargs="+", type=int, default=None, metavar="SEED", help="these seeds' cells"
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=("tabular", "quickstart"), default=["tabular", "quickstart"]
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), metavar="TABLE")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the quickstart task (3)")
    parser.add_argument("--tabular-seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help="steps of a quickstart run (40)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step of a quickstart run (32)")
    parser.add_argument("--sft-steps", type=int, default=170, help="steps of the warm start (170)")
    args = parser.parse_args()
    if "quickstart" in args.tasks and args.work is None:
        parser.error("--work is missing: the task quickstart keeps its warm start there")
    return args


def grid(args: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    for task in args.tasks:
        for seed in range(args.tabular_seeds if task == "tabular" else args.seeds):
            if args.only is not None and seed not in args.only:
                continue
            for table in args.tables:
                for name in TABLES[table]:
                    yield task, table, name, seed


def on_table(variant: Variant, seed: int) -> dict[str, float]:
    algorithm = AlgorithmConfig.model_validate(variant.algorithm)
    return tabular.train(algorithm, seed, n=variant.n, steps=TABULAR_STEPS, mini_batches=4, lr=0.05)


def on_model(variant: Variant, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Run the trainer once, from the warm start, which the first call trains."""
    folder: Path = args.work
    task, warm = folder / "task", folder / f"sft-{args.sft_steps}"
    data = f"data.train.path={task}/data/train.jsonl"
    if not (warm / "hf").exists():
        command(str(QUICKSTART / "make_task.py"), "--out", str(task))
        sft = [f"model.path={task}/model", data, f"output_dir={warm}", f"train.steps={args.sft_steps}"]
        train("sft.yaml", *sft, f"optimizer.warmup_steps={min(20, args.sft_steps - 1)}")
    out = folder / f"run-{os.getpid()}"
    settings = {
        "algorithm": variant.algorithm,
        "rollout.n": variant.n,
        "model.path": str(warm / "hf"),
        "data.train.limit": variant.prompts,
        "data.eval.path": str(task / "data" / "test.parquet"),
        "output_dir": str(out),
        "train.seed": seed,
        "train.steps": args.steps,
        "train.prompts_per_step": args.prompts,
        "train.mini_batches": 4,
        "optimizer.warmup_steps": min(8, 4 * args.steps - 1),
        "eval.every": 0,
        "checkpoint.every": 0,
        "checkpoint.export_hf": False,
        "logging.tensorboard": False,
    }
    train("gvpo.yaml", data, *(f"{key}={json.dumps(value)}" for key, value in settings.items()))
    summary = json.loads((out / "summary.json").read_text())
    shutil.rmtree(out)
    return {"reward": summary["pass_at_1_after"], "start": summary["pass_at_1_before"]}


def train(file: str, *overrides: str) -> None:
    files = [str(QUICKSTART / file), str(ROOT / "examples" / "cpu.yaml")]
    command("-m", "megatron_gvpo", "train", "--overwrite", *files, *overrides)


def command(*arguments: str) -> None:
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def rewards(done: dict[str, Any], task: str, table: str, name: str) -> list[float]:
    return column(done, task, table, name, "reward")


def column(done: dict[str, Any], task: str, table: str, name: str, of: str) -> list[float]:
    """Return one number of every seed's cell."""
    prefix = f"{task} | {table} | {name} | "
    return [result[of] for key, result in done.items() if key.startswith(prefix)]


def spread(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error (infinite with one seed)."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def verdict(better: list[float], worse: list[float]) -> str:
    (a, error_a), (b, error_b) = spread(better), spread(worse)
    error = math.hypot(error_a, error_b)
    if not math.isfinite(error):
        return "one seed: nothing to say"
    z = (a - b) / error if error else math.copysign(math.inf, a - b) if a != b else 0.0
    word = "agrees" if z > 2 else "contradicts" if z < -2 else "not separated"
    return f"{word} ({a - b:+.3f}, {z:+.1f} standard errors)"


def flatness(rewards_of: dict[str, list[float]]) -> str:
    """Say if the rows may be equally good: the best and the worst differ by no more than chance explains."""
    best, worst = (pick(rewards_of, key=lambda name: fmean(rewards_of[name])) for pick in (max, min))
    (a, error_a), (b, error_b) = spread(rewards_of[best]), spread(rewards_of[worst])
    z = (a - b) / math.hypot(error_a, error_b)
    if not math.isfinite(math.hypot(error_a, error_b)):
        return "one seed: nothing to say"
    word = "contradicts" if z > 3 else "agrees"
    return f"{word} ({best} is {a - b:.3f} above {worst}, {z:.1f} standard errors)"


def in_short(lines: list[str]) -> str:
    """Count the claims by verdict."""
    verdicts = ("agrees", "not separated", "contradicts")
    counts = {word: sum(f": {word} (" in line for line in lines) for word in verdicts}
    return f"In short: {counts['agrees']} claims agree, {counts['not separated']} are not separated, " + (
        f"{counts['contradicts']} contradicted."
    )


def report(done: dict[str, Any], args: argparse.Namespace) -> str:
    lines = ["# The papers' tables on two small tasks", "", __doc__.split("\n\n", 1)[1].rstrip(), ""]
    for task in args.tasks:
        what = "expected reward" if task == "tabular" else "held-out pass@1"
        for table in args.tables:
            drawn = " responses drawn |" if task == "tabular" else ""
            lines += [f"## {table}, {task}", "", f"| | {what} at the end | seeds |{drawn}"]
            lines += ["|---|---|---|" + ("---|" if drawn else "")]
            by_name = {name: rewards(done, task, table, name) for name in TABLES[table]}
            for name, values in by_name.items():
                if values:
                    mean, error = spread(values)
                    shown = f"{mean:.3f}" + (f" ± {error:.3f}" if math.isfinite(error) else "")
                    counts = column(done, task, table, name, "responses") if drawn else []
                    count = f" {fmean(counts):.0f} |" if counts else ""
                    lines.append(f"| {name} | {shown} | {len(values)} |{count}")
            wanted = args.tabular_seeds if task == "tabular" else args.seeds
            missing = [f"{name} ({wanted - len(v)})" for name, v in by_name.items() if len(v) < wanted]
            lines += ["", f"Not run yet, of {wanted} seeds each: {', '.join(missing)}."] if missing else []
            lines.append("")
            for better, worse in CLAIMS.get(table, []):
                if by_name[better] and by_name[worse]:
                    lines.append(f"- {better} above {worse}: {verdict(by_name[better], by_name[worse])}")
            if table in FLAT and all(by_name.values()):
                lines.append(f"- flat, says the figure: {flatness(by_name)}")
            lines.append("")
    lines.insert(4, in_short(lines) + "\n")
    return "\n".join(lines)


def plot(done: dict[str, Any], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for task in args.tasks:
        if not any(key.startswith(f"{task} | ") for key in done):
            continue
        figure, axes = pyplot.subplots(
            1, len(args.tables), figsize=(4 * len(args.tables), 3.2), squeeze=False
        )
        for axis, table in zip(axes[0], args.tables, strict=True):
            by_name = {name: rewards(done, task, table, name) for name in TABLES[table]}
            by_name = {name: values for name, values in by_name.items() if values}
            spreads = [spread(values) for values in by_name.values()]
            errors = [error if math.isfinite(error) else 0.0 for _, error in spreads]
            axis.errorbar(range(len(by_name)), [mean for mean, _ in spreads], errors, fmt="o", capsize=3)
            axis.set_xticks(range(len(by_name)), list(by_name), rotation=30, ha="right", fontsize=7)
            axis.set_title(table, fontsize=8)
        figure.tight_layout()
        figure.savefig(args.out / f"{task}.png", dpi=150)
        pyplot.close(figure)


if __name__ == "__main__":
    main()
