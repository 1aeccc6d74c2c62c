"""Compares a training step of SmolLM2-135M with the speed of the processor's own matrix products.

It trains the model of examples/smollm2 as `make real` does, on one rank of one thread, and records every
operator of the last step with its shapes. Then it computes the products and the attention of that step again,
alone: each shape as often as it occurred, on random numbers, with the same operators. Both are measured in
processor seconds of the same process, one after the other.

    OMP_NUM_THREADS=1 python benchmarks/smollm2_step.py --out benchmarks/results/smollm2_step_cpu.json

The result has the seconds of a step without the recording, the seconds of its products alone, their ratio,
the products' arithmetic (2 m n k) with its speed, and the share of each kind of operator.
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
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from smollm2_vs_trl import cached_model
from torch import Tensor

from megatron_gvpo.settings.config import load_config
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "smollm2"
# For each operator, the position of its left matrix among its tensors; the right matrix follows, and perhaps
# `out`.
PRODUCTS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "mkldnn::_linear_pointwise": 0,
}
KINDS = {
    "attention": ("attention",),
    "elementwise": ("mul", "silu", "sigmoid", "norm", "softmax", "rsqrt", "pow", "exp"),
    "copies and concatenations": ("copy", "cat", "index", "gather", "clone", "fill", "zero", "scatter"),
    "additions": ("add", "sum", "sub", "cumsum"),
}
Shapes = tuple[str, tuple[tuple[int, ...], ...]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=5, help="steps; the last one is recorded (5)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure = train(Path(directory), args.steps)
    calls = product_calls(measure.recording)
    alone = products_alone(calls)
    step_s = median(measure.seconds)
    result = {
        "machine": {"processor": processor_name(), "load": round(os.getloadavg()[0], 1)},
        "versions": {"torch": torch.__version__},
        "steps_s": [round(seconds, 2) for seconds in measure.seconds],
        "step_s": round(step_s, 2),
        "recorded_step_s": round(measure.recorded_s, 2),
        "products_alone_s": round(alone, 2),
        "step_over_products": round(step_s / alone, 2),
        "products_tflop": round(sum(flops(*shape) * count for shape, count in calls.items()) / 1e12, 3),
        "products": sum(calls.values()),
        "operators": operator_shares(measure.recording),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


class Measure(Callback):
    """Takes the processor seconds of steps after the first, and the operators of the last one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []
        self.recorded_s = 0.0
        self._began = 0.0
        self.recording = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        )

    def on_step(self, trainer: Trainer, step: int, metrics: Any) -> None:
        now = time.process_time()
        if step == self.steps:
            self.recording.stop()
            self.recorded_s = now - self._began
        elif step > 1:
            self.seconds.append(now - self._began)
        if step == self.steps - 1:
            self.recording.start()
        self._began = time.process_time()


def train(directory: Path, steps: int) -> Measure:
    sys.path.insert(0, str(EXAMPLE))
    from make_task import make_task

    make_task(directory / "task")
    subprocess.run([sys.executable, str(EXAMPLE / "model.py")], check=True)
    measure = Measure(steps)
    overrides = {
        "output_dir": directory / "run",
        "model.path": cached_model(),
        "data.train.path": directory / "task" / "train.jsonl",
        "data.eval": None,
        "train.steps": steps,
        "checkpoint.every": 0,
        "checkpoint.export_hf": False,
        "eval.every": 0,
    }
    texts = [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    os.chdir(ROOT)
    Trainer(load_config([EXAMPLE / "gvpo.yaml"], texts), [measure]).fit()
    return measure


def product_calls(recording: torch.profiler.profile) -> Counter[Shapes]:
    """Return how often each product occurred, by its operator and the shapes of its matrices."""
    calls: Counter[Shapes] = Counter()
    for event in recording.key_averages(group_by_input_shape=True):
        if event.key in PRODUCTS:
            first = PRODUCTS[event.key]
            matrices = tuple(tuple(shape) for shape in event.input_shapes[first : first + 2])
            calls[event.key, matrices] += event.count
    return calls


def products_alone(calls: Counter[Shapes]) -> float:
    """Processor seconds of all products, from the fastest of a few repetitions of each shape."""
    return sum(seconds_of(*shape) * count for shape, count in calls.items())


def seconds_of(name: str, shapes: tuple[tuple[int, ...], ...]) -> float:
    matrices = [torch.randn(shape) for shape in shapes]
    fastest = float("inf")
    for _ in range(4):
        repetitions = 1 if flops(name, shapes) > 1e9 else 20
        began = time.process_time()
        for _ in range(repetitions):
            product(name, matrices)
        fastest = min(fastest, (time.process_time() - began) / repetitions)
    return fastest


def product(name: str, matrices: list[Tensor]) -> Tensor:
    if name == "mkldnn::_linear_pointwise":
        return torch.ops.mkldnn._linear_pointwise(*matrices, None, "none", [], "")
    left, right = matrices
    return left @ right


def flops(name: str, shapes: tuple[tuple[int, ...], ...]) -> float:
    left, right = shapes
    columns = right[-2] if name == "mkldnn::_linear_pointwise" else right[-1]
    rows = 1.0
    for size in left[:-1]:
        rows *= size
    return 2 * rows * left[-1] * columns


def operator_shares(recording: torch.profiler.profile) -> dict[str, float]:
    """Percent of the operators' own processor time by kind of operator."""
    times: Counter[str] = Counter()
    for event in recording.key_averages():
        times[kind_of(event.key)] += event.self_cpu_time_total
    return {kind: round(100 * time / times.total(), 1) for kind, time in times.most_common()}


def kind_of(operator: str) -> str:
    if operator in PRODUCTS:
        return "matrix products"
    for kind, marks in KINDS.items():
        if any(mark in operator for mark in marks):
            return kind
    return "the rest"


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
