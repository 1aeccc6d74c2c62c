"""Measures the cost of saving the responses: its share of a step, and seconds and bytes for a million tokens.

The run is GVPO on a model and prompts of the quickstart's sizes, untrained, so that most responses have the
full 96 tokens. Its model of 0.8 M parameters makes the share as large as it gets: a larger model takes longer
for the same responses. The cost is in processor time, which other programs on the machine change little: the
main thread's for passing on the responses and for the weights that the loss alone does not need, and all of
the writing thread's. Each is given as a share of the whole process's processor time. Each round is a process
of its own.

The million tokens are synthetic: 512 responses of 2048 random tokens with all columns.
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
PROMPTS, K, TOKENS = 64, 8, 96


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a round; the first is left out (4)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/rollout_files_cpu.json")
    parser.add_argument("--one-round", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_round:
        args.one_round.write_text(json.dumps(one_round(args.steps)))
        return
    rounds = []
    for i in range(args.rounds):
        with tempfile.NamedTemporaryFile() as file:
            command = [sys.executable, __file__, "--one-round", file.name, "--steps", str(args.steps)]
            load = os.getloadavg()[0]
            subprocess.run(command, check=True)
            result = json.loads(Path(file.name).read_text()) | {"load_before": load}
        rounds.append(result)
        print(f"round {i + 1}: {json.dumps(result)}", flush=True)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "step": {"prompts": PROMPTS, "responses": K, "max_tokens": TOKENS, "parameters": "0.8 M"},
        "rounds": rounds,
        "million_tokens": million_tokens(),
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["million_tokens"]))


def one_round(steps: int) -> dict[str, float]:
    """Train `steps` steps; return the shares of the steps after the first."""
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    import make_task

    from megatron_gvpo.megatron import policy
    from megatron_gvpo.observe.rollouts.writer import RolloutWriter
    from megatron_gvpo.settings.config import load_config
    from megatron_gvpo.training.callbacks import Callback, Recorder
    from megatron_gvpo.training.trainer import Trainer

    main, thread = Clock(time.thread_time), Clock(time.thread_time)
    policy.token_weights = main(policy.token_weights)
    for owner, name, clock in (
        (Recorder, "on_responses", main),
        (RolloutWriter, "write", main),
        (Trainer, "_trained", main),
        (RolloutWriter, "_write", thread),
        (RolloutWriter, "_drop_oldest", thread),
    ):
        setattr(owner, name, clock(getattr(owner, name)))

    marks: list[tuple[float, float, float, float, float]] = []

    class Meter(Callback):
        def on_step(self, trainer: Trainer, step: int, metrics: Any) -> None:
            marks.append((time.process_time(), time.perf_counter(), main.cpu, thread.cpu, main.wall))

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
                "data.eval=null",
                f"train.steps={steps}",
                "optimizer.warmup_steps=0",
                "checkpoint.every=0",
                "checkpoint.export_hf=false",
                "logging.tensorboard=false",
                "logging.progress=off",
            ],
        )
        trainer = Trainer(config, [Recorder(), Meter()])
        trainer.fit()
        size = sum(file.stat().st_size for file in (task / "run" / "rollouts").iterdir())
        trainer.close()
    begin, end = marks[1], marks[-1]  # after the first step, whose file the thread may still write
    process, wall, by_main, by_thread, waited = (b - a for a, b in zip(begin, end, strict=True))
    return {
        "cpu_share": (by_main + by_thread) / process,
        "cpu_share_of_main_thread": by_main / process,
        "wall_share_of_main_thread": waited / wall,
        "step_cpu_s": process / (steps - 1),
        "step_wall_s": wall / (steps - 1),
        "kilobytes_a_step": size / steps / 1000,
    }


def million_tokens() -> dict[str, float]:
    """Return the processor seconds and megabytes of the file of 512 responses of 2048 tokens."""
    import numpy as np
    import torch

    from megatron_gvpo.groups import Group, Prompt, Rollout
    from megatron_gvpo.observe.rollouts.table import Responses, TrainedRows
    from megatron_gvpo.observe.rollouts.writer import RolloutWriter
    from megatron_gvpo.settings.sections import RolloutFilesConfig
    from megatron_gvpo.types import TrainBatch

    random, length = np.random.default_rng(0), 2048
    prompt = Prompt("p", tuple(range(512)), "What is asked? " * 100)

    def rollout() -> Rollout:
        ids, logps = random.integers(0, 150_000, length).tolist(), (-random.exponential(size=length)).tolist()
        return Rollout(ids, logps, " ".join(map(str, ids)), "length", rewards={"math": 1.0})

    groups = [Group(prompt, [rollout() for _ in range(8)]) for _ in range(64)]
    rows = TrainBatch.from_groups(groups)
    logp_r = torch.randn(512 * length)
    responses = Responses("train", 1, groups, [TrainedRows(rows, logp_r, torch.randn(512 * length))])
    with tempfile.TemporaryDirectory() as directory:
        writer, clock = (
            RolloutWriter(Path(directory), RolloutFilesConfig(), ["math"], None),
            Clock(time.thread_time),
        )
        clock(writer._write)(responses)
        writer.close()
        size = (Path(directory) / "rollouts" / "step_000001.parquet").stat().st_size
    million = 512 * length / 1e6
    return {"thread_cpu_s": clock.cpu / million, "megabytes": size / 1e6 / million}


if __name__ == "__main__":
    main()
