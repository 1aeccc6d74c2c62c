"""Trains with truncated sampling, with the recorded supports and without them, and with full sampling.

    python benchmarks/truncated_sampling.py [--seeds 0 1 2] [--steps 40] [--out FILE]

The quickstart's model and task, from its warm start. `supports`: log-probs over the supports that the tokens
were sampled from, which is what the package does. `none`: truncated sampling too, but the trainer's log-probs
are over the whole vocabulary, as in trainers that do not know the supports. `full`: top_p 1, so there are no
supports. The loss of `grpo` is weighted with the ratio to the policy that sampled (`importance: truncate`);
GVPO's has no ratio.

The models are made once, in runs/truncated_sampling. The file gets each run as it ends, with the
held-out pass@1 by step and the tokens' ratios of trainer to engine before each step's first update. Started
again, the program goes on with the runs that the file lacks. `--table` prints the file as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lib.quickstart import CPU, QUICKSTART, ROOT, commit, make_start, python

RUNS = Path("runs/truncated_sampling")
TOP_P = 0.8
RECIPES = {
    "gvpo": ["algorithm=gvpo", "algorithm.loss.beta=0.1"],
    "grpo": ["algorithm=grpo", "algorithm.loss.importance=truncate"],
}
ARMS = ("supports", "none", "full")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/truncated_sampling_cpu.json")
    options = parser.parse_args()
    report = json.loads(options.out.read_text()) if options.out.exists() else begin(options.steps)
    if report["steps"] != options.steps:
        sys.exit(f"{options.out} has runs of {report['steps']} steps: give another --out")
    if not options.table:
        train_all(report, options.seeds, options.out)
    print(table(report))


def begin(steps: int) -> dict[str, Any]:
    return {
        "what": "held-out pass@1 by step, and ratios of trainer to engine, with truncated sampling",
        "command": "OMP_NUM_THREADS=1 python benchmarks/truncated_sampling.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores beside other work",
        "top_p": TOP_P,
        "steps": steps,
        "runs": [],
    }


def train_all(report: dict[str, Any], seeds: list[int], out: Path) -> None:
    """Make the runs that the report lacks, each in a process of its own."""
    make_start(RUNS)
    done = {(run["recipe"], run["arm"], run["seed"]) for run in report["runs"]}
    for seed in seeds:
        for recipe in RECIPES:
            for arm in ARMS:
                if (recipe, arm, seed) in done:
                    continue
                load = os.getloadavg()[0]
                result = json.loads(python(["-c", CHILD, recipe, arm, str(seed), str(report["steps"])]))
                head = {"recipe": recipe, "arm": arm, "seed": seed, "commit": commit()}
                loads = {"load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)]}
                date = {"date": datetime.now(UTC).date().isoformat()}
                report["runs"].append(head | date | loads | result)
                out.write_text(json.dumps(report, indent=1) + "\n")
                print(recipe, arm, seed, result["pass_at_1"], flush=True)


CHILD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import truncated_sampling
truncated_sampling.train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""


def train(recipe: str, arm: str, seed: int, steps: int) -> None:
    """Train once in this process; the last line of its output is the run's result as JSON."""
    from megatron_gvpo.megatron import batch
    from megatron_gvpo.settings.config import load_config
    from megatron_gvpo.training.callbacks import Recorder
    from megatron_gvpo.training.trainer import Trainer

    out = RUNS / f"{recipe}-{arm}-{seed}"
    overrides = [f"output_dir={out}", f"model.path={RUNS}/sft/hf", f"train.seed={seed}", *RECIPES[recipe]]
    overrides += [
        f"data.train.path={RUNS}/task/data/train.jsonl",
        f"train.steps={steps}",
        "eval.every=10",
        "optimizer.warmup_steps=0",
    ]
    overrides += [f"data.eval.path={RUNS}/task/data/test.parquet", "checkpoint.export_hf=false"]
    # Evaluations sample from the whole vocabulary in all arms, so that they compare models alone.
    overrides += ["checkpoint.every=0", f"rollout.top_p={1.0 if arm == 'full' else TOP_P}"]
    overrides.append("eval.sampling={temperature: 1.0, max_tokens: 96, top_p: 1.0}")
    if arm == "none":
        batch._supports = lambda rows: None
    config = load_config([str(QUICKSTART / "gvpo.yaml"), str(CPU)], overrides)
    trainer = Trainer(config, [Recorder()], overwrite=True)
    trainer.fit()
    trainer.close()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = {line["step"]: round(line["eval/pass@1"], 4) for line in lines if "eval/pass@1" in line}
    print(json.dumps({"pass_at_1": curve, "ratios": ratios_of(out)}))


def ratios_of(out: Path) -> list[dict[str, float]]:
    """Return each step's mean ratio before its first update, and the share of ratios outside [0.9, 1.1]."""
    from megatron_gvpo.observe import step_records

    rows = []
    for step in step_records.recorded_steps(out):
        record = step_records.read(out, step)
        update, engine_r = record.updates[0], record.mini_batches[0].engine_logp_r
        assert update.logp_r is not None and engine_r is not None
        ratio_r = (update.logp_r - engine_r).exp()
        share = float(((ratio_r < 0.9) | (ratio_r > 1.1)).float().mean())
        rows.append({"step": step, "mean": round(float(ratio_r.mean()), 5), "outside": round(share, 5)})
    return rows


def table(report: dict[str, Any]) -> str:
    """Means of the seeds with standard errors, in Markdown."""
    lines = [
        "| recipe | log-probs | seeds | mean ratio | ratios outside [0.9, 1.1] | pass@1 before | after |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe in RECIPES:
        for arm in ARMS:
            runs = [run for run in report["runs"] if (run["recipe"], run["arm"]) == (recipe, arm)]
            if not runs:
                continue
            first, last = ([list(run["pass_at_1"].values())[i] for run in runs] for i in (0, -1))
            mean, outside = (
                statistics.mean(row[name] for run in runs for row in run["ratios"])
                for name in ("mean", "outside")
            )
            after = f"{statistics.mean(last):.1%}"
            if len(last) > 1:
                after += f" ± {statistics.stdev(last) / len(last) ** 0.5:.1%}"
            before = f"{statistics.mean(first):.1%}"
            lines.append(
                f"| {recipe} | {arm} | {len(runs)} | {mean:.3f} | {outside:.1%} | {before} | {after} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
