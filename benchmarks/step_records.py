"""Measures what the record of a step costs: its share of a step's processor and wall time, and its bytes.

    python benchmarks/step_records.py [--steps 4] [--out FILE.json]

The run is GVPO on a model and prompts of the quickstart's sizes, untrained, so that most responses have the
full 96 tokens. Its model of 0.8 M parameters makes the share of the file as large as it gets. The sums over
gradients and weights grow with the model, and so does the step: each reads a parameter twice, and a step
reads and computes with it for every token. The first step is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.clock import Clock

ROOT = Path(__file__).parents[1]
PROMPTS, K, TOKENS = 64, 8, 96


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/step_records_cpu.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": load,
        "step": {"prompts": PROMPTS, "responses": K, "max_tokens": TOKENS, "parameters": "0.8 M"},
        **measured(args.steps),
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def measured(steps: int) -> dict[str, float]:
    """Train `steps` steps; the shares of the later ones."""
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    import make_task

    from megatron_gvpo.megatron.tensor_sums import TensorSums
    from megatron_gvpo.observe.step_records import StepRecords
    from megatron_gvpo.settings.config import load_config
    from megatron_gvpo.training.callbacks import Callback, Recorder
    from megatron_gvpo.training.trainer import Trainer

    sums, files = Clock(), Clock()
    TensorSums.take = sums(TensorSums.take)  # type: ignore[method-assign]
    StepRecords.write = files(StepRecords.write)  # type: ignore[method-assign]
    marks: list[tuple[float, float, float, float, float, float]] = []

    class Meter(Callback):
        def on_step(self, trainer: Trainer, step: int, metrics: Any) -> None:
            now = (time.process_time(), time.perf_counter())
            marks.append((*now, sums.cpu, sums.wall, files.cpu, files.wall))

    with tempfile.TemporaryDirectory() as directory:
        task = Path(directory)
        make_task.SIZES = {"train": PROMPTS * steps, "validation": 4, "test": 8}
        make_task.make_model(task / "model", seed=0)
        make_task.make_data(task / "data", seed=0)
        config = load_config(
            [ROOT / "examples/quickstart/gvpo.yaml", ROOT / "examples/cpu.yaml"],
            [
                f"output_dir={task}/run",
                f"model.path={task}/model",
                f"data.train.path={task}/data/train.jsonl",
                *("data.eval=null", f"train.steps={steps}", "optimizer.warmup_steps=0", "checkpoint.every=0"),
                *("checkpoint.export_hf=false", "logging.tensorboard=false", "logging.progress=off"),
            ],
        )
        trainer = Trainer(config, [Recorder(), Meter()])
        trainer.fit()
        size = sum(file.stat().st_size for file in (task / "run" / "steps").iterdir())
        trainer.close()
    cpu, wall, sums_cpu, sums_wall, files_cpu, files_wall = (
        b - a for a, b in zip(marks[1], marks[-1], strict=True)
    )
    return {
        "cpu_share": (sums_cpu + files_cpu) / cpu,
        "wall_share": (sums_wall + files_wall) / wall,
        "cpu_share_of_sums": sums_cpu / cpu,
        "cpu_share_of_files": files_cpu / cpu,
        "step_cpu_s": cpu / (steps - 1),
        "step_wall_s": wall / (steps - 1),
        "kilobytes_a_step": size / steps / 1000,
    }


if __name__ == "__main__":
    main()
