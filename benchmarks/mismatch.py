"""Trains on rollouts that are off-policy on purpose, once with each correction, scenario and seed.

    python benchmarks/mismatch.py [--workers 2] [--seeds 0 1 2 3 4] [--out FILE.jsonl]
    python benchmarks/mismatch.py --table

The task is the quickstart's, from its supervised model, which is made once (runs/mismatch), cut down to
`SETTINGS`. The embedded engine samples from a copy of the weights that a scenario changes:

    exact    no change
    bf16     every tensor is rounded to bf16
    fp8      every matrix, the embeddings included, is rounded to FP8 e4m3, with one scale
    stale4   the weights of four steps before

Each run is a process of its own with one thread, and each finished run a line of the file. Started again, the
program goes on with the runs that the file lacks. pass@1 is that of the trainer's final weights, which are
not rounded, on the held-out problems. The table has the mean of pass@1 over seeds, and the standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.quickstart import make_start, python

if TYPE_CHECKING:
    from torch import Tensor

RUNS = Path("runs/mismatch")
RESULTS = Path("benchmarks/results/mismatch_cpu.jsonl")
STALE = 4  # steps

GRPO = {"recipe": "grpo", "loss": {"kl_coef": 0.0}}
CORRECTIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "token truncate": {"name": "truncate"},
    "sequence truncate": {"name": "truncate", "level": "sequence"},
    "geometric truncate": {"name": "truncate", "level": "geometric"},
    "token mask": {"name": "mask"},
    "sequence mask": {"name": "mask", "level": "sequence"},
    "geometric reject": {"name": "reject", "level": "geometric", "low": 0.95, "high": 1.05},
    "gvpo, none": None,
}
SCENARIOS = ("exact", "stale4", "fp8", "bf16")
SETTINGS: dict[str, Any] = {
    "data": {"max_prompt_tokens": 64},
    "rollout": {"n": 8, "temperature": 1.0, "max_tokens": 96, "batch_size": 256},
    "rewards": {"components": [{"name": "math"}]},
    "train": {"steps": 12, "prompts_per_step": 32, "mini_batches": 4, "max_tokens_per_micro_batch": 16384},
    "optimizer": {"lr": 1.0e-4, "warmup_steps": 2},
    "eval": {"n": 2, "k": [1], "sampling": {"temperature": 1.0, "max_tokens": 96}},
    "checkpoint": {"every": 0},
    "logging": {"tensorboard": False},
}
# Means over a run's steps.
WATCHED = (
    *("mismatch/kl", "train/grad_norm", "train/importance", "train/importance_ess"),
    *("train/importance_truncated", "train/importance_masked", "train/importance_masked_responses"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one thread each (2)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    parser.add_argument("--run", nargs=3, metavar=("CORRECTION", "SCENARIO", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        correction, scenario, seed = options.run
        print(json.dumps(run(correction, scenario, int(seed))))
    elif options.table:
        print(table(lines(options.out)))
    else:
        measure(options.out, options.seeds, options.workers)


def measure(out: Path, seeds: list[int], workers: int) -> None:
    """Make the runs that the file lacks, and append a line to the file for each finished run."""
    begin(out)
    make_start(RUNS)
    done = {(line["correction"], line["scenario"], line["seed"]) for line in lines(out)}
    wanted = [(c, s, seed) for seed in seeds for s in SCENARIOS for c in CORRECTIONS if needed(c, s)]
    missing = [key for key in wanted if key not in done]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {out}", flush=True)
    with ThreadPoolExecutor(workers) as pool:
        for line in pool.map(in_its_process, missing):
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    print(table(lines(out)))


def needed(correction: str, scenario: str) -> bool:
    """False if the correction has no effect: with an exact engine all weights are 1."""
    return scenario != "exact" or CORRECTIONS[correction] is None


def begin(out: Path) -> None:
    """Write the file's first line: the settings. The program exits if the file has other settings."""
    head = {
        "settings": SETTINGS,
        "corrections": CORRECTIONS,
        "grpo": GRPO,
        "stale": STALE,
        "machine": {"machine": platform.machine(), "cores": os.cpu_count()},
    }
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(head) + "\n")
        return
    old_head = json.loads(out.read_text().split("\n", 1)[0])
    if changed := [key for key in head if key != "machine" and old_head.get(key) != head[key]]:
        sys.exit(f"{out} was measured with other {', '.join(changed)}: give --out a new file, or remove it")


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()[1:]]


def in_its_process(key: tuple[str, str, int]) -> dict[str, Any]:
    """Make one run in a new process. If the run fails, the program exits with the end of the run's output."""
    correction, scenario, seed = key
    load = os.getloadavg()[0]
    result = json.loads(python([__file__, "--run", correction, scenario, str(seed)]))
    return {**result, "load_at_start": load}


def run(correction: str, scenario: str, seed: int) -> dict[str, Any]:
    """Train once in this process, and evaluate the final weights."""
    import torch

    from megatron_gvpo.settings.config import as_config
    from megatron_gvpo.settings.servers import ENGINES
    from megatron_gvpo.training.callbacks import Callback
    from megatron_gvpo.training.evaluate import evaluate
    from megatron_gvpo.training.trainer import Trainer

    records: list[dict[str, float]] = []

    class Kept(Callback):
        def on_step(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
            if step:
                records.append(dict(metrics))

    torch.set_num_threads(1)
    start = time.perf_counter()
    out = RUNS / f"{scenario}-{correction}-{seed}".replace(" ", "_").replace(",", "")
    algorithm: dict[str, Any] = {"recipe": "gvpo"}
    if not correction.startswith("gvpo"):
        algorithm = {**GRPO, "loss": {**GRPO["loss"], "importance": CORRECTIONS[correction]}}  # type: ignore[dict-item]
    data = {"train": {"path": str(RUNS / "task" / "data" / "train.jsonl")}}
    config = {
        **SETTINGS,
        "output_dir": str(out),
        "model": {"path": str(RUNS / "sft" / "hf"), "dtype": "float32"},
        "data": SETTINGS["data"] | data,
        "algorithm": algorithm,
        "train": SETTINGS["train"] | {"seed": seed},
    }
    own, ENGINES["local"] = ENGINES["local"], f"__main__:engine_of_{scenario}"
    trainer = Trainer(as_config(config), [Kept()], overwrite=True)
    trainer.fit()
    trainer.close()
    ENGINES["local"] = own
    held_out = {"eval": {"path": str(RUNS / "task" / "data" / "test.parquet")}}
    graded = config | {
        "model": {"path": str(out / "hf"), "dtype": "float32"},
        "data": config["data"] | held_out,
        "algorithm": "gvpo",
    }
    metrics = evaluate(as_config(graded), resume=False)
    means = {
        name: statistics.fmean(values)
        for name in WATCHED
        if (values := [record[name] for record in records if record.get(name) is not None])
    }
    return {
        "correction": correction,
        "scenario": scenario,
        "seed": seed,
        "pass_at_1": metrics["eval/pass@1"],
        "reward_by_step": [round(record["reward/mean"], 3) for record in records],
        "mean_over_steps": means,
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time(),
    }


def bf16(name: str, tensor: Tensor) -> Tensor:
    import torch

    return tensor.to(torch.bfloat16).to(tensor.dtype)


def fp8(name: str, tensor: Tensor) -> Tensor:
    import torch

    if tensor.ndim < 2:
        return tensor
    scale = tensor.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale


def engine(*parts: Any, rounded: Any = None, stale: int = 0) -> Any:
    """The embedded engine with weights that are rounded, or older by `stale` pushes."""
    from megatron_gvpo.sampling.embedded import EmbeddedEngine

    class OffPolicyEngine(EmbeddedEngine):
        def __init__(self) -> None:
            super().__init__(*parts)
            self._pushes: deque[list[tuple[str, Tensor]]] = deque(maxlen=stale + 1)

        def sync(self, version: int) -> None:
            """Report the present version in any case, so that mismatch/kl measures the change's effect."""
            self._pushes.append(list(changed(self._policy.weights(on_host=False))))
            self._model.load(self._pushes[0], version)

    def changed(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield name, rounded(name, tensor) if rounded else tensor.clone()

    return OffPolicyEngine()


def engine_of_exact(*parts: Any) -> Any:
    return engine(*parts)


def engine_of_bf16(*parts: Any) -> Any:
    return engine(*parts, rounded=bf16)


def engine_of_fp8(*parts: Any) -> Any:
    return engine(*parts, rounded=fp8)


def engine_of_stale2(*parts: Any) -> Any:
    return engine(*parts, stale=2)


def engine_of_stale4(*parts: Any) -> Any:
    return engine(*parts, stale=STALE)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: mean pass@1 in per cent, standard error and number of seeds, by correction and scenario."""
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in results:
        cells[line["correction"], line["scenario"]].append(100 * line["pass_at_1"])
    columns = [name for name in SCENARIOS if any(s == name for _, s in cells)]
    rows = [f"| correction | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for correction in CORRECTIONS:
        shown = [cell(cells.get((correction, name), [])) for name in columns]
        rows.append(f"| {correction} | {' | '.join(shown)} |")
    return "\n".join(rows)


def cell(values: list[float]) -> str:
    if not values:
        return "-"
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{error} ({len(values)})"


if __name__ == "__main__":
    main()
