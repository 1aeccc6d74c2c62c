"""The command `train` on an emulated GPU does what it does on the CPU: losses, norms, exported weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import on_null_cuda
from helpers.paths import ROOT
from helpers.suite.real_parts import used
from safetensors.torch import load_file

from megatron_gvpo.rehearsal import transformer_engine

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")
_EMULATION = [sys.executable, "-W", "ignore", "-m", "megatron_gvpo.emulation"]


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_quickstarts_first_steps_are_those_of_the_cpu(tmp_path: Path, ranks: int) -> None:
    """Two steps of its supervised warm start, which samples nothing; with two ranks, of --nproc.

    Adam divides a gradient by its own size: what rounds differently in a tiny gradient moves a weight by up
    to twice the learning rate, 3e-3; here by less than a thirtieth of it.
    """
    transformer_engine.build(lambda _: None)
    example = ROOT / "examples" / "quickstart"
    _run(tmp_path, sys.executable, str(example / "make_task.py"), "--out", "runs/quickstart/task")
    settings = ["train.steps=2", "train.prompts_per_step=8", "optimizer.warmup_steps=0"]
    train = ["-m", "megatron_gvpo", "train", str(example / "sft.yaml"), *settings, "model.dtype=float32"]
    train += ["--nproc", str(ranks)]
    _run(tmp_path, *_EMULATION, *train, "output_dir=runs/gpu")
    used("emulated GPU")
    _run(tmp_path, sys.executable, *train, "output_dir=runs/cpu")
    metrics = {
        name: [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").open()]
        for name in ("gpu", "cpu")
    }
    for key in ("train/loss", "train/grad_norm"):
        gpu, cpu = ([line[key] for line in lines if key in line] for lines in metrics.values())
        assert len(gpu) == 2 and gpu == pytest.approx(cpu, rel=1e-5), key
    gpu_weights, cpu_weights = (
        load_file(tmp_path / "runs" / name / "hf" / "model.safetensors") for name in ("gpu", "cpu")
    )
    assert gpu_weights.keys() == cpu_weights.keys()
    assert any(not gpu_weights[key].equal(weight) for key, weight in cpu_weights.items()), "other kernels"
    for key, weight in cpu_weights.items():
        assert (gpu_weights[key] - weight).abs().max() < 3e-3 / 30, key


@pytest.mark.proof
def test_gvpo_samples_and_trains_on_two_ranks(task: Path, tmp_path: Path) -> None:
    """The embedded engine and the trainer compute there; their log-probs of the sampled tokens are equal.

    The random numbers are not those of the CPU, so that rewards cannot be compared.
    """
    transformer_engine.build(lambda _: None)
    settings = ["algorithm=gvpo", "train.steps=2", "train.mini_batches=2", "data.eval=null"]
    settings += [f"output_dir={tmp_path / 'run'}", "parallel.tp=2", "--nproc", "2"]
    _run(tmp_path, *_EMULATION, "-m", "megatron_gvpo", "train", str(task / "run.yaml"), *settings)
    used("emulated GPU")
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()][1:]
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["reward/mean"] <= 1 and step["train/grad_norm"] > 0
        assert step["mismatch/abs_max"] < 1e-4, "nats"


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
