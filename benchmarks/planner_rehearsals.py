"""Compares the planner's memory with that of rehearsed ranks, part by part.

    python benchmarks/planner_rehearsals.py            # writes benchmarks/results/planner_rehearsals.json
    python benchmarks/planner_rehearsals.py NAME...    # only the rows whose names have one of these words
    python benchmarks/planner_rehearsals.py --predict  # only new predictions, after a change of the planner

A row is a rank of a layout: a model of few layers with its true widths, two updates of full micro-batches.
`rehearsed` is the most memory that PyTorch's allocator had allocated in the updates; no value was computed,
and no GPU is needed (docs/howto/rehearse.md). Both numbers are without CUDA's context, NCCL and
fragmentation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lib.planner.rehearsed_rows import MODELS, ROWS, Row

from megatron_gvpo.planner.prediction import predict
from megatron_gvpo.rehearsal import made_model
from megatron_gvpo.rehearsal.nullcuda.devices import DEVICES, GIB
from megatron_gvpo.rehearsal.process import environment_of_ranks, run_jobs
from megatron_gvpo.rehearsal.rank import RankJob
from megatron_gvpo.settings.config import Config, load_config

RESULT = Path(__file__).parent / "results" / "planner_rehearsals.json"
ROOM = 400  # GiB of a device that does not run out of memory
CONFIG = """\
output_dir: out
data: {train: {path: train.jsonl}}
algorithm: gvpo
rollout: {n: 4, max_tokens: 1536}
rewards: {components: [{name: math}]}
train: {steps: 10, prompts_per_step: 512}
optimizer: {lr: 1.0e-6}
"""


def job_of(row: Row, folder: Path) -> RankJob:
    """Write the row's model and configuration into a new folder, and return a rehearsing process's job."""
    directory = folder / "model"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(_config_of(row)))
    made_model.add_image_processor(directory)
    file = folder / "config.yaml"
    file.write_text(CONFIG)
    keys = [*row.keys, f"model.path={directory}", f"train.max_tokens_per_micro_batch={row.tokens}"]
    return RankJob([str(file)], keys, row.rank, row.world, made=[str(directory)], until="second update")


def _config_of(row: Row) -> dict[str, Any]:
    """The model's config.json with as many layers as the row has; one of them is dense, if any was."""
    config: dict[str, Any] = {"torch_dtype": "bfloat16", **(MODELS | made_model.known_models())[row.model]}
    (config.get("text_config") or config)["num_hidden_layers"] = row.layers
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    return config


def predicted(row: Row, folder: Path) -> dict[str, float]:
    """The planner's GiB by part; `peak` is their sum without the planner's runtime."""
    stage = row.rank * pipeline(row) // row.world
    parts = predict(configuration(row, folder), row.world, stage=stage)
    assert parts is not None, row.name
    parts["peak"] = parts["total"] - parts["runtime"]
    return {name: round(parts[name], 3) for name in ("weights", "gradients", "optimizer", "peak")}


def configuration(row: Row, folder: Path) -> Config:
    """The row's configuration, beside its model in `folder`."""
    job = job_of(row, folder)
    return load_config(job.files, job.overrides)


def pipeline(row: Row) -> int:
    """The number of the row's pipeline stages."""
    return next((int(word.partition("=")[2]) for word in row.keys if word.startswith("parallel.pp=")), 1)


def rehearsed(rows: Sequence[Row], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield each row's name, and its rehearsal's memory and counts."""
    variables = environment_of_ranks(DEVICES["h200"], 8, ROOM * GIB)
    jobs = [job_of(row, folder / f"row-{number}") for number, row in enumerate(rows)]
    for row, result in zip(rows, run_jobs(jobs, variables, folder), strict=True):
        yield {"row": row.name, **of_interest(result)}


def of_interest(result: dict[str, Any]) -> dict[str, Any]:
    """Select the file's numbers: a rehearsed rank's memory, and the work and messages of its passes."""
    updates = [phase for phase in result["phases"] if phase["name"].endswith("update")]
    parts = {name: result["parts"][name] for name in ("weights", "gradients", "optimizer")}
    parts["peak"] = max(phase["peak"] for phase in updates)
    counted = ("matrix_flops", "kernel_launches", "copies_on_device", "host_waits")
    counts = {
        phase["name"]: {name: phase["counts"].get(name, 0) for name in counted}
        for phase in result["phases"]
        if phase["name"] in ("scoring", "first update")
    }
    return {
        "rehearsed_gib": {name: round(size, 3) for name, size in parts.items()},
        "reserved_gib": round(max(phase["reserved"] for phase in updates), 3),
        "pack": result["pack"],
        "counts": counts,
        "collectives": updates[0]["collectives"],
        "seconds": round(sum(one["seconds"] + one["compile_seconds"] for one in result["phases"]), 1),
    }


def with_prediction(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The result of a row, with the planner's prediction."""
    [row] = [row for row in ROWS if row.name == result["row"]]
    planned = predicted(row, folder)
    ratio = round(planned["peak"] / result["rehearsed_gib"]["peak"], 4)
    return {**result, "predicted_gib": planned, "ratio": ratio}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="words of the rows' names; default: all rows")
    parser.add_argument("--predict", action="store_true", help="rehearse nothing")
    options = parser.parse_args()
    named = [row for row in ROWS if not options.names or any(word in row.name for word in options.names)]
    results = []
    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        measured = (
            json.loads(RESULT.read_text())["rows"] if options.predict else rehearsed(named, Path(folder))
        )
        for number, one in enumerate(measured):
            result = with_prediction(one, Path(folder) / f"planned-{number}")
            results.append(result)
            print(f"{result['ratio']:.3f}  {result['row']}  {result['rehearsed_gib']}")
    worst = max(abs(result["ratio"] - 1) for result in results)
    print(f"{len(results)} rows; the largest difference is {worst:.1%}")
    earlier = json.loads(RESULT.read_text())["rows"] if options.names else []
    by_name = {result["row"]: result for result in [*earlier, *results]}
    rows = [by_name[row.name] for row in ROWS if row.name in by_name]
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
