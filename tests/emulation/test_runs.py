"""The command `train` on an emulated GPU does what it does on the CPU: losses, rewards, exported weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import IMPORTS, ROOT
from helpers.suite.real_parts import used
from safetensors.torch import load_file

from megatron_gvpo.rehearsal import transformer_engine

_EMULATION = [sys.executable, "-W", "ignore", "-m", "megatron_gvpo.emulation"]
# Metrics of a step that samples, and their relative tolerances.
_EQUAL = {"reward/mean": 1e-9, "train/loss": 1e-4, "train/grad_norm": 1e-4}


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]


def _on_both(folder: Path, *train: str) -> dict[str, list[dict[str, Any]]]:
    """The metrics of a run on emulated GPUs and on the CPU, by its directory: "gpu" and "cpu"."""
    transformer_engine.build(lambda _: None)
    _run(folder, *_EMULATION, *train, "output_dir=gpu")
    used("emulated GPU")
    _run(folder, sys.executable, *train, "output_dir=cpu")
    files = {name: folder / name / "metrics.jsonl" for name in ("gpu", "cpu")}
    return {name: [json.loads(line) for line in file.open()] for name, file in files.items()}


def _assert_equal_weights(folder: Path, start: Path) -> None:
    """Both runs move each tensor from the model `start` to the same place, to a thousandth of the way.

    Single weights may differ by more: Adam divides a gradient by its own size, and what rounds differently in
    a tiny gradient moves a weight by up to twice the learning rate.
    """
    models = (folder / "gpu" / "hf", folder / "cpu" / "hf", start)
    gpu_weights, cpu_weights, before = (load_file(model / "model.safetensors") for model in models)
    assert gpu_weights.keys() == cpu_weights.keys()
    assert any(not gpu_weights[key].equal(weight) for key, weight in cpu_weights.items()), "other kernels"
    for key, weight in cpu_weights.items():
        assert (gpu_weights[key] - weight).norm() < 1e-3 * (weight - before[key]).norm(), key


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_quickstarts_first_steps_are_those_of_the_cpu(tmp_path: Path, ranks: int) -> None:
    """Two steps of its supervised warm start, which samples nothing; with two ranks, of --nproc."""
    example = ROOT / "examples" / "quickstart"
    _run(tmp_path, sys.executable, str(example / "make_task.py"), "--out", "runs/quickstart/task")
    settings = ["train.steps=2", "train.prompts_per_step=8", "optimizer.warmup_steps=0"]
    train = ["-m", "megatron_gvpo", "train", str(example / "sft.yaml"), *settings, "model.dtype=float32"]
    metrics = _on_both(tmp_path, *train, "--nproc", str(ranks))
    for key in ("train/loss", "train/grad_norm"):
        gpu, cpu = ([line[key] for line in lines if key in line] for lines in metrics.values())
        assert len(gpu) == 2 and gpu == pytest.approx(cpu, rel=1e-5), key
    _assert_equal_weights(tmp_path, tmp_path / "runs/quickstart/task/model")


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [1, 2])
def test_gvpo_samples_and_trains_as_on_the_cpu(task: Path, tmp_path: Path, ranks: int) -> None:
    """The embedded engine and the trainer compute there; with two ranks, in tp. The engine's draws are
    NumPy's: both runs sample the same responses, and their rewards are equal.
    """
    settings = ["algorithm=gvpo", "train.steps=2", "train.mini_batches=2", "data.eval=null"]
    settings += ["optimizer.warmup_steps=0", f"parallel.tp={ranks}", "--nproc", str(ranks)]
    metrics = _on_both(tmp_path, "-m", "megatron_gvpo", "train", str(task / "run.yaml"), *settings)
    gpu, cpu = ([line for line in lines if "train/loss" in line] for lines in metrics.values())
    print([{key: (a[key], b[key]) for key in _EQUAL} for a, b in zip(gpu, cpu, strict=True)])
    assert len(gpu) == 2
    for on_gpu, on_cpu in zip(gpu, cpu, strict=True):
        assert 0 < on_gpu["reward/mean"] <= 1 and on_gpu["train/grad_norm"] > 0
        assert on_gpu["mismatch/abs_max"] < 1e-4, "nats"
        for key, tolerance in _EQUAL.items():
            assert on_gpu[key] == pytest.approx(on_cpu[key], rel=tolerance), key
    _assert_equal_weights(tmp_path, task / "model")


LENDING = """
import json, sys
from pathlib import Path
import torch
from helpers.tiny_run import GVPO, configure, fit, records
from megatron_gvpo.megatron.device_memory import storages
from megatron_gvpo.training.callbacks import Callback

class LendAfterEveryStep(Callback):
    freed = ()

    def on_step(self, trainer, step, metrics):
        policy = trainer.components.policy
        memory, model, optimizer = policy.memory, policy.model, policy.optimizer
        parts = (*model.weights(), *model.gradient_buffers(), *optimizer.tensors())
        state = sum(s.nbytes() for s in storages(t for t in parts if t.is_cuda).values())
        free, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        memory.release("training")
        memory.copy_weights_ahead()
        memory.release("weights")
        freed = torch.cuda.mem_get_info()[0] - free
        self.freed = [state, allocated - torch.cuda.memory_allocated(), freed]
        for part in ("weights", "training"):
            memory.restore(part)

task, out, lender = Path(sys.argv[1]), Path(sys.argv[2]), LendAfterEveryStep()
for name, callbacks in (("keeps", []), ("lends", [lender])):
    fit(configure(task, out / name, *GVPO, "data.eval=null", "train.steps=2"), callbacks)
print(json.dumps([*lender.freed, records(out / "keeps") == records(out / "lends")]))
"""


@pytest.mark.proof
def test_a_colocated_engine_gets_the_memory_of_the_gpu(task: Path, tmp_path: Path) -> None:
    """The trainer's memory is free on the device for an engine's turn, and comes back bit for bit."""
    transformer_engine.build(lambda _: None)
    (tmp_path / "lending.py").write_text(LENDING)
    command = [*_EMULATION, str(tmp_path / "lending.py"), str(task), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": IMPORTS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    used("emulated GPU")
    state, released, freed, is_equal = json.loads(done.stdout.splitlines()[-1])
    print(f"{state} bytes of state; {released} released, {freed} free on the device")
    assert is_equal
    assert released == pytest.approx(state, rel=0.02) and freed >= released


def test_a_program_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """And computes: the product is the CPU's."""
    transformer_engine.build(lambda _: None)
    (tmp_path / "beside.py").write_text("SIZE = 3")
    (tmp_path / "program.py").write_text(
        "import torch, beside; print((torch.ones(beside.SIZE, device='cuda') @ torch.ones(3).cuda()).item())"
    )
    command = [*_EMULATION, str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "3.0\n", done.stderr[-3000:]
    used("emulated GPU")


def test_without_a_program_it_says_how_to_use_it() -> None:
    done = subprocess.run(_EMULATION, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: python -m megatron_gvpo.emulation")


def test_without_the_extension_it_says_how_to_get_it(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [*_EMULATION, "program.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "megatron-gvpo rehearse --build" in done.stderr and done.stderr.count("\n") == 1


def test_a_process_without_the_null_cuda_is_refused() -> None:
    code = "from megatron_gvpo.emulation import emulated_gpu; emulated_gpu.install()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ConfigError: the emulated GPU needs the null CUDA" in done.stderr
