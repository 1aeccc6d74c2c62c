"""Measures the cost of a step's record: its share of a step's processor and wall time, and its bytes.

    python benchmarks/step_records.py [--task smollm2] [--steps 4] [--out FILE.json]

The run is GVPO. On the task `quickstart` it has a model and prompts of the quickstart's sizes, untrained, so
that most responses have the full 96 tokens. Its model of 0.8 M parameters makes the share of the file as
large as it gets. The sums over gradients and weights grow with the model, and so does the step: the sums
read each parameter twice, and a step reads and computes with it for every token. On the task `smollm2` it is
`make real` on one rank: the short responses of a large model make the share of the sums as large as it gets.
The first step is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.clock import Clock

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "smollm2"
STEPS: dict[str, dict[str, Any]] = {  # by task
    "quickstart": {"prompts": 64, "responses": 8, "max_tokens": 96, "parameters": "0.8 M"},
    "smollm2": {"prompts": 16, "responses": 8, "max_tokens": 16, "parameters": "135 M"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=STEPS, default="quickstart")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/step_records_..._cpu.json")
    args = parser.parse_args()
    of_task = "" if args.task == "quickstart" else f"_{args.task}"
    out = args.out or ROOT / f"benchmarks/results/step_records{of_task}_cpu.json"
    load = os.getloadavg()[0]
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": load,
        "step": STEPS[args.task],
        **measured(args.task, args.steps),
    }
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def quickstart(directory: Path, steps: int) -> tuple[list[Path], list[str]]:
    """The configuration of the quickstart's sizes: files and overrides."""
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    import make_task

    make_task.SIZES = {"train": STEPS["quickstart"]["prompts"] * steps, "validation": 4, "test": 8}
    make_task.make_model(directory / "model", seed=0)
    make_task.make_data(directory / "data", seed=0)
    files = [ROOT / "examples/quickstart/gvpo.yaml", ROOT / "examples/cpu.yaml"]
    return files, [f"model.path={directory}/model", f"data.train.path={directory}/data/train.jsonl"]


def smollm2(directory: Path, steps: int) -> tuple[list[Path], list[str]]:
    """The configuration of `make real`: files and overrides. It fetches the model where it is missing."""
    sys.path.insert(0, str(EXAMPLE))
    from make_task import make_task
    from model import cached_model

    make_task(directory / "task")
    subprocess.run([sys.executable, str(EXAMPLE / "model.py")], check=True)
    overrides = [f"model.path={cached_model()}", f"data.train.path={directory}/task/train.jsonl"]
    return [EXAMPLE / "gvpo.yaml"], [*overrides, "eval.every=0"]


def measured(task: str, steps: int) -> dict[str, float]:
    """Train `steps` steps; return the shares of the steps after the first."""
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
        make = {"quickstart": quickstart, "smollm2": smollm2}[task]
        files_of_task, overrides = make(Path(directory), steps)
        overrides += [f"output_dir={directory}/run", "data.eval=null", f"train.steps={steps}"]
        overrides += ["optimizer.warmup_steps=0", "checkpoint.every=0", "checkpoint.export_hf=false"]
        overrides += ["logging.tensorboard=false", "logging.progress=off"]
        os.chdir(ROOT)  # the configuration names smollm2's file of rewards relative to the repository
        config = load_config(files_of_task, overrides)
        trainer = Trainer(config, [Recorder(), Meter()])
        trainer.fit()
        size = sum(file.stat().st_size for file in (Path(directory) / "run" / "steps").iterdir())
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
