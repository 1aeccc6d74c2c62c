"""Tests the papers' claims on a real language model: SmolLM2-135M-Instruct on the sums of examples/smollm2.

    python benchmarks/smollm2_papers.py --out benchmarks/results/paper_tables --work /tmp/smollm2_papers

A cell is one row with one seed: a whole run of the trainer from the pretrained model. All rows have the
settings of examples/smollm2/gvpo.yaml, with half of the steps, and the same learning rate, which is constant.
The rows of other learning rates have one seed, and the other seeds only for the rate that is a method's best
with the first: so each method is compared at its best of three rates. A cell ends when it has sampled as many
responses as the others, even if its method samples several batches a step; then it is graded on held-out
sums. Rows with the same seed see the same problems.

A finished cell is a line of smollm2.jsonl, and is never repeated; lines of other settings do not count. So
the program can be stopped and continued, and `--minutes` stops it by itself, after a step. smollm2.md has the
tables, the verdicts on the papers' claims and the missing cells, smollm2.png the curves.
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
from typing import Any, NamedTuple

from paper_tables import spread, verdict

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "smollm2"
LEARNING_RATE = 3e-5
NO_KL = {"kl_coef": 0.0}
TRUNCATED = {"name": "truncate", "level": "sequence"}


class Row(NamedTuple):
    """An algorithm, the age of the weights that sample, in steps, and the learning rate."""

    algorithm: dict[str, Any]
    stale: int = 0
    lr: float = LEARNING_RATE


GVPO = {"recipe": "gvpo"}
GRPO = {"recipe": "grpo", "loss": NO_KL}
WEIGHTED_GRPO = {"recipe": "grpo", "loss": {**NO_KL, "importance": TRUNCATED}}
ROWS = {
    "GVPO": Row(GVPO),
    "GVPO without Var": Row({"recipe": "gvpo_minus_var"}),
    "GVPO without Cov": Row({"recipe": "gvpo_minus_cov"}),
    "GVPO without Var and Cov": Row({"recipe": "gvpo_minus_var_cov"}),
    "GRPO": Row(GRPO),
    "GPG without AGE": Row({"recipe": "gpg_b"}),
    "GPG with AGE": Row({"recipe": "gpg_c"}),
    "Dr. GRPO": Row({"recipe": "dr_grpo"}),
    "DAPO": Row({"recipe": "dapo"}),
    "GSPO": Row({"recipe": "gspo"}),
    "RLOO": Row({"recipe": "rloo"}),
    "REINFORCE++": Row({"recipe": "reinforce_pp"}),
    "GVPO, 2 steps old": Row(GVPO, stale=2),
    "GRPO, 2 steps old": Row(GRPO, stale=2),
    "GRPO with importance, 2 steps old": Row(WEIGHTED_GRPO, stale=2),
    "GVPO, 4 steps old": Row(GVPO, stale=4),
    "GRPO, 4 steps old": Row(GRPO, stale=4),
    "GRPO with importance, 4 steps old": Row(WEIGHTED_GRPO, stale=4),
}
METHODS = ("GVPO", "GRPO", "GPG with AGE", "Dr. GRPO", "GSPO", "RLOO", "REINFORCE++", "DAPO")
OTHER_RATES = {"lr 1e-5": 1e-5, "lr 1e-4": 1e-4}
RATES_OF = {method: (method, *(f"{method}, {rate}" for rate in OTHER_RATES)) for method in METHODS}
ROWS |= {
    f"{name}, {rate}": ROWS[name]._replace(lr=lr) for name in METHODS for rate, lr in OTHER_RATES.items()
}
BEST_RATES = "Methods at their best rate"
Cells = Mapping[tuple[str, int], Mapping[str, Any]]  # the lines of the finished cells, by row and seed

TABLES = {  # in the order in which cells run
    "GVPO Table 2": tuple(ROWS)[:4],
    "GVPO, GRPO and GPG": ("GVPO", "GRPO", "GPG without AGE", "GPG with AGE"),
    "Other methods": ("GVPO", "GRPO", "Dr. GRPO", "GSPO", "RLOO", "REINFORCE++", "DAPO"),
    "Stale samples": ("GVPO", "GRPO", *(name for name in ROWS if name.endswith("steps old"))),
    "Learning rates": tuple(name for rates in RATES_OF.values() for name in rates),
}
CLAIMS = {  # table: [(better row, worse row)] according to the papers
    "GVPO Table 2": [("GVPO", name) for name in tuple(ROWS)[1:4]],
    "GVPO, GRPO and GPG": [
        ("GVPO", "GRPO"),
        ("GPG with AGE", "GRPO"),
        ("GPG with AGE", "GPG without AGE"),
    ],
    "Other methods": [("GVPO", "Dr. GRPO")],
    BEST_RATES: [("GVPO", "GRPO"), ("GVPO", "Dr. GRPO"), ("GPG with AGE", "GRPO")],
    "Stale samples": [
        (f"{better}, {age} steps old", f"GRPO, {age} steps old")
        for age in (2, 4)
        for better in ("GVPO", "GRPO with importance")
    ],
}


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(EXAMPLE))
    end = time.monotonic() + 60 * args.minutes
    while not args.table and (cells := missing(args)) and time.monotonic() < end:
        name, seed = cells[0]
        if (line := run(name, seed, args, end)) is None:
            break
        with (args.out / "smollm2.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        print(f"{name}, seed {seed}: {line['strict']:.3f}, {line['processor_s']:.0f} s", flush=True)
    results = read(args)
    (args.out / "smollm2.md").write_text(report(results, args))
    draw(results, args.out / "smollm2.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of smollm2.jsonl, .md and .png")
    parser.add_argument("--work", type=Path, required=True, help="directory of the task and a run's files")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after this time")
    parser.add_argument("--table", action="store_true", help="run nothing: write the tables of the results")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--problems", type=int, default=16, help="problems a step (16)")
    parser.add_argument("--responses", type=int, default=8, help="responses to a problem (8)")
    parser.add_argument("--held-out", type=int, default=256, help="held-out sums, one response each (256)")
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> dict[str, int]:
    """The settings that all cells share."""
    return {name: getattr(args, name) for name in ("steps", "problems", "responses", "held_out")}


def read(args: argparse.Namespace) -> dict[tuple[str, int], dict[str, Any]]:
    """The finished cells with these settings, by row and seed."""
    file = args.out / "smollm2.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(line["row"], line["seed"]): line for line in lines if line["of"] == settings_of(args)}


def missing(args: argparse.Namespace) -> list[tuple[str, int]]:
    """The cells to run, a table's seeds one after another, so that a stopped table has all rows of a seed."""
    results = read(args)
    cells = [
        (name, seed)
        for table in TABLES
        for seed in range(args.seeds)
        for name in TABLES[table]
        if seed < seeds_of(name, results, args)
    ]
    return [cell for cell in dict.fromkeys(cells) if cell not in results and cell[0] in args.rows]


def seeds_of(name: str, results: Cells, args: argparse.Namespace) -> int:
    """The number of a row's seeds: one for a learning rate that is not the best of its method."""
    is_other_rate = any(name in rates[1:] for rates in RATES_OF.values())
    best = {best_rate(method, results) for method in METHODS}
    return 1 if is_other_rate and name not in best else args.seeds


def best_rate(method: str, results: Cells) -> str | None:
    """The row with the method's best learning rate for the first seed; None until all its rates ran."""
    cells = {name: results.get((name, 0)) for name in RATES_OF[method]}
    strict = {name: cell["strict"] for name, cell in cells.items() if cell is not None}
    return max(strict, key=strict.__getitem__) if len(strict) == len(cells) else None


def run(name: str, seed: int, args: argparse.Namespace, end: float) -> dict[str, Any] | None:
    """Train and grade one cell in this process; None if `end`, of the monotonic clock, came first."""
    import torch
    from lib.smollm2.cells import train_and_grade
    from make_task import make_task
    from model import cached_model, make_model

    from megatron_gvpo.settings.config import load_config
    from megatron_gvpo.settings.servers import ENGINES

    torch.set_num_threads(1)
    if not cached_model().exists():
        make_model(cached_model())
    make_task(args.work / "task")
    row = ROWS[name]
    curve: list[float] = []
    lengths: list[float] = []
    sampled = 0

    def has_its_responses(step: int, metrics: Mapping[str, float]) -> bool:
        nonlocal sampled
        if step:
            curve.append(round(metrics["reward/strict"], 4))
            lengths.append(round(metrics["response/length"], 2))
            sampled += int(metrics.get("batch/rounds", 1)) * args.problems * args.responses
        return sampled >= args.steps * args.problems * args.responses

    engine = ENGINES["local"]
    if row.stale:
        ENGINES["local"] = f"mismatch:engine_of_stale{row.stale}"
    begin, processor, load = time.perf_counter(), time.process_time(), os.getloadavg()[0]
    overrides = [f"{key}={json.dumps(value)}" for key, value in overrides_of(row, seed, args).items()]
    config = load_config([EXAMPLE / "gvpo.yaml"], [f"model.path={cached_model().resolve()}", *overrides])
    try:
        grades = train_and_grade(config, has_its_responses, end)
    finally:
        ENGINES["local"] = engine
    if not grades:
        return None
    return {
        "row": name,
        "seed": seed,
        **grades,
        "curve": curve,
        "response_tokens": lengths,
        "responses": sampled,
        "processor_s": round(time.process_time() - processor, 1),
        "clock_s": round(time.perf_counter() - begin, 1),
        "load": round(load, 1),
        "of": settings_of(args),
    }


def overrides_of(row: Row, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The keys that differ from the example's configuration."""
    return {
        "output_dir": str(args.work / "run"),
        "data.train.path": str(args.work / "task" / "train.jsonl"),
        "data.eval.path": str(args.work / "task" / "test.jsonl"),
        "data.eval.limit": args.held_out,
        "algorithm": row.algorithm,
        "rollout.n": args.responses,
        "train.seed": seed,
        "train.steps": args.steps,
        "train.prompts_per_step": args.problems,
        "train.max_empty_batches": 10 * args.steps,  # the pretrained model is right in 2 % of its responses
        "optimizer.lr": row.lr,
        "optimizer.decay": "constant",
        "optimizer.warmup_steps": min(4, 2 * args.steps - 1),
        "eval.every": 0,
        "eval.n": 1,
        "checkpoint.every": 0,
        "checkpoint.export_hf": False,
    }


def report(results: Cells, args: argparse.Namespace) -> str:
    lines = ["# The papers' claims on SmolLM2-135M", "", (__doc__ or "").split("\n\n", 1)[1].rstrip(), ""]
    lines += [", ".join(f"{key.replace('_', '-')} {n}" for key, n in settings_of(args).items()) + ".", ""]
    for table, names in TABLES.items():
        lines += [*table_of(table, {name: name for name in names}, results, args), ""]
    lines += [*rates_of(results), ""]  # below the last of these tables, which is that of the rates
    best = {method: name for method in METHODS if (name := best_rate(method, results)) is not None}
    lines += table_of(BEST_RATES, best, results, args)
    return "\n".join(lines).rstrip() + "\n"


def table_of(table: str, rows: Mapping[str, str], results: Cells, args: argparse.Namespace) -> list[str]:
    """A table's lines: means and standard errors, the cells that did not run, and verdicts on its claims.

    `rows`: for each name that the table's claims have, the row that is shown.
    """
    lines = [f"## {table}", ""]
    by_row = {name: cells_of(results, name) for name in rows.values()}
    if any(by_row.values()):
        lines += ["| | held out, strict | lenient | mean of the last four steps | seeds | responses |"]
        lines += ["|---|---|---|---|---|---|"]
    for name, cells in by_row.items():
        if cells:
            columns = [[cell[key] for cell in cells] for key in ("strict", "lenient")]
            columns.append([fmean(cell["curve"][-4:]) for cell in cells])
            shown = " | ".join(map(percent, columns))
            drawn = fmean(cell["responses"] for cell in cells)
            lines.append(f"| {name} | {shown} | {len(cells)} | {drawn:.0f} |")
    counts = {name: seeds_of(name, results, args) - len(cells) for name, cells in by_row.items()}
    absent = [f"{name} ({count})" for name, count in counts.items() if count > 0]
    if absent:
        lines += ["", f"Not run, in cells: {', '.join(absent)}."]
    verdicts = []
    for better, worse in CLAIMS.get(table, []):
        pair = [[cell["strict"] for cell in by_row.get(rows.get(name, ""), [])] for name in (better, worse)]
        if all(pair):
            verdicts.append(f"- {better} above {worse}: {verdict(*pair)}")
    return [*lines, *(["", *verdicts] if verdicts else [])]


def rates_of(results: Cells) -> list[str]:
    """A line for each method whose learning rates all ran with the first seed: the best one."""
    lines = []
    for method in METHODS:
        if (best := best_rate(method, results)) is not None:
            shares = {ROWS[name].lr: results[name, 0]["strict"] for name in RATES_OF[method]}
            shown = ", ".join(f"{100 * share:.1f} with {lr:.0e}" for lr, share in sorted(shares.items()))
            lines.append(f"- {method}: best with {ROWS[best].lr:.0e} ({shown}; seed 0)")
    return lines


def cells_of(results: Cells, name: str) -> list[Mapping[str, Any]]:
    return [line for (row, _), line in results.items() if row == name]


def percent(values: list[float]) -> str:
    mean, error = spread(values)
    return f"{100 * mean:.1f}" + (f" ± {100 * error:.1f}" if math.isfinite(error) else "")


def draw(results: Cells, png: Path) -> None:
    """The share of right responses over the steps, for each table; bands are standard errors over seeds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from megatron_gvpo.observe.summary import GREY, STYLE

    finished = {name for name, _ in results}
    rows = {table: finished & set(names) for table, names in TABLES.items()}
    tables = list[str]()
    for table in tuple(TABLES)[:-1]:  # draw only the tables with rows that no table before them shows
        if len(rows[table]) > 1 and not any(rows[table] <= rows[shown] for shown in tables):
            tables.append(table)
    if not tables:
        return
    with rc_context(STYLE):
        figure = Figure(figsize=(3.7 * len(tables), 2.9), layout="constrained")
        axes = figure.subplots(1, len(tables), squeeze=False, sharey=True)[0]
        for axis, table in zip(axes, tables, strict=True):
            for name in TABLES[table]:
                # For a method that samples several batches a step, the curve has only groups with signal.
                cells = [
                    cell for cell in cells_of(results, name) if len(cell["curve"]) == cell["of"]["steps"]
                ]
                if not cells:
                    continue
                points = [spread(list(values)) for values in zip(*(c["curve"] for c in cells), strict=True)]
                steps = range(1, len(points) + 1)
                (line,) = axis.plot(steps, [100 * mean for mean, _ in points], label=name)
                if len(cells) > 1:
                    low, high = ([100 * (m + sign * e) for m, e in points] for sign in (-1, 1))
                    axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            axis.set_title(table)
            axis.set_xlabel("step", color=GREY)
            axis.legend(frameon=False, fontsize=6.5, loc="upper left")
        axes[0].set_ylabel("right responses, %", color=GREY)
        figure.savefig(png, dpi=130)


if __name__ == "__main__":
    main()
