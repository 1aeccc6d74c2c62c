"""A machine with GPUs that a run could not use: said before torch is imported."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from helpers.inputs import family_task
from helpers.tiny_run import GVPO, configure

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core import gpu_packages
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.gpus import LocalGpu
from megatron_gvpo.core.versions import REFERENCE


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the driver's list of GPUs and for a torch that is built for CUDA 13."""
    one = LocalGpu(0, "H100", 80.0, (9, 0), 18)
    monkeypatch.setattr("megatron_gvpo.checks.preflight.list_gpus", lambda: [one])
    monkeypatch.setattr(gpu_packages, "list_gpus", lambda: [one])
    monkeypatch.setattr("megatron_gvpo.checks.preflight.version", lambda _: "2.13.0")
    monkeypatch.setattr(gpu_packages, "cuda_of_torch", lambda: "13.0")
    monkeypatch.setattr(gpu_packages, "driver_version", lambda: "550.54")
    monkeypatch.setattr(gpu_packages, "driver_cuda", lambda: 13)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_driver_that_torch_cannot_use_is_named(h100: None, task: Any, tmp_path: Path, monkeypatch) -> None:
    """Before, torch found no GPU, and the run trained on the CPU without a word."""
    monkeypatch.setattr(gpu_packages, "driver_cuda", lambda: 12)
    config = configure(task, tmp_path / "out", *GVPO, "model.dtype=bfloat16")
    words = r"built for CUDA 13\.0, and the driver 550\.54 knows CUDA up to 12, so torch would use the CPU"
    with pytest.raises(ConfigError, match=words):
        preflight(config, "train", 1)
    preflight(config, "slurm", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    preflight(config, "train", 1)


def test_a_missing_transformer_engine_is_named_with_its_command(
    h100: None, task: Any, tmp_path: Path, monkeypatch
) -> None:
    config = configure(task, tmp_path / "out", *GVPO, "model.dtype=bfloat16")
    words = rf"Transformer Engine .* is missing.*pytorch\]=={REFERENCE['transformer-engine']}'"
    with pytest.raises(ConfigError, match=words):
        preflight(config, "train", 1)
    package = tmp_path / "site" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)  # hidden on CPUs
    assert gpu_packages.transformer_engine_is_partial()
    with pytest.raises(ConfigError, match=words):
        preflight(config, "train", 1)
    (package / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    assert not gpu_packages.transformer_engine_is_partial()
    preflight(config, "train", 1)


def test_a_teacher_without_an_attention_kernel_is_refused(
    h100: None, task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, such a run ended in its first update, or kept all scores of a pack."""
    monkeypatch.setattr("megatron_gvpo.checks.preflight.check_gpu_packages", lambda: None)
    teacher = ["algorithm=opd_full", f"teacher.path={tmp_path}/teacher", "model.dtype=bfloat16"]
    config = configure(task, tmp_path / "out", *teacher)
    shutil.copytree(config.model.path, tmp_path / "teacher")
    preflight(config, "train", 1)
    shape = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(shape | {"head_dim": 12}))
    words = rf"^teacher\.path={tmp_path}/teacher: head dimensions 12 and 12 on a GPU .* keep all scores"
    with pytest.raises(ConfigError, match=words):
        preflight(config, "train", 1)
    preflight(config, "eval", 1)


def test_the_torch_of_this_environment_says_what_it_is_built_for() -> None:
    import torch

    assert gpu_packages.cuda_of_torch() == torch.version.cuda


def test_quack_where_it_cannot_run_is_refused(
    h100: None, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster's job is checked for its model alone, because its nodes have other GPUs and packages."""
    monkeypatch.setattr("megatron_gvpo.checks.preflight.check_gpu_packages", lambda: None)
    shutil.copytree(configure(task, tmp_path / "out", *GVPO).model.path, tmp_path / "model")
    file = tmp_path / "model" / "config.json"

    def refused(command: Literal["train", "slurm"], vocab_size: int, *overrides: str) -> str:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": vocab_size}))
        words = (f"model.path={tmp_path}/model", "model.dtype=bfloat16", "train.head_backend=quack")
        try:
            preflight(configure(task, tmp_path / "out", *GVPO, *words, *overrides), command, 1)
        except ConfigError as error:
            return str(error)
        return ""

    assert refused("slurm", 256) == refused("train", 256) == ""
    assert "64 divides, and this is vocab_size=250; leave it out" in refused("slurm", 250)
    assert "this is model.dtype=float32; leave" in refused("slurm", 256, "model.dtype=float32")
    monkeypatch.setattr("megatron_gvpo.checks.preflight.find_spec", lambda name: None)
    assert "not installed (pip install 'megatron-gvpo[quack]')" in refused("train", 256)
    b200 = LocalGpu(0, "B200", 180.0, (10, 0), 18)
    monkeypatch.setattr("megatron_gvpo.checks.preflight.list_gpus", lambda: [b200])
    assert "capability 9.0 (H100, H200), and this machine has 10.0" in refused("train", 256)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "and this machine has no GPU that torch uses" in refused("train", 256)
    assert refused("slurm", 256) == ""


def test_gpus_that_torch_does_not_find_end_a_run(h100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose fabric manager does not run would train on the CPU without a word."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU that torch finds")
    with pytest.raises(ConfigError, match=r"^the driver lists 1 GPUs, and torch finds none: "):
        gpu_packages.check_no_gpu_is_missed()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpu_packages.check_no_gpu_is_missed()


def test_gated_delta_nets_without_their_kernels_are_refused_on_a_gpu(
    h100: None, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, Megatron ended with an ImportError when it built the model, on every GPU."""
    monkeypatch.setattr(gpu_packages, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(gpu_packages.util, "find_spec", lambda name: None if name == "fla" else object())
    shaped = family_task.make(task, tmp_path / "task", "Qwen3.5")
    config = configure(shaped, tmp_path / "out", *GVPO, "model.dtype=bfloat16")
    words = rf"gated delta nets .* pip install flash-linear-attention=={REFERENCE['fla-core']}"
    with pytest.raises(ConfigError, match=words):
        preflight(config, "train", 1)
    preflight(config, "slurm", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    preflight(config, "train", 1)
    exact = configure(shaped, tmp_path / "out", *GVPO, "train.deterministic=true")
    with pytest.raises(ConfigError, match=r"train\.deterministic=true: .* gated delta nets"):
        preflight(exact, "train", 1)
