"""The smallest form of benchmarks/device_check.py runs everything that can run on this machine."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import on_null_cuda
from helpers.suite.real_parts import used

_TRAINED = ("qwen2.5-1.5b", "7b, 8 layers")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_check.py"
REHEARSAL = SCRIPT.with_name("device_rehearsal.py")
REHEARSED = json.loads((SCRIPT.parent / "results" / "device_check_rehearsed.json").read_text())["results"]


def test_each_check_names_proofs_that_exist() -> None:
    """Every check that runs, and no other, has a line; the test files in it are there."""
    text = SCRIPT.read_text()
    [table] = re.findall(r"^PROOFS = (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    proofs: dict[str, str] = ast.literal_eval(table)
    checks = set(re.findall(r'attempt\(report, "(\w+)"', text))
    assert proofs.keys() == checks | {"fp8", "train"} and len(checks) == 6
    tests = {file.name for file in (SCRIPT.parents[1] / "tests").rglob("test_*.py")}
    for proof in proofs.values():
        named = {Path(file).name for file in re.findall(r"[\w/]*test_\w+\.py", proof)}
        assert named and named <= tests, named - tests


@pytest.mark.proof
def test_the_smoke_form_runs_what_there_is_and_names_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--smoke", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    used("megatron-core and Megatron-Bridge, 1 rank")
    report = json.loads(out.read_text())
    assert "failed" not in report
    results = report["results"]
    assert {"head", "layers", "shared", *_TRAINED} <= results.keys()
    assert all(part["right"] for part in results.values())
    assert {"float32 stash", "bfloat16 weights_first", "bfloat16 recompute"} <= results["head"].keys()
    assert results["layers"]["float32"]["gradient"] < 1e-3
    memory = {name: part["memory_gib"] for name, part in results["offload"].items() if name != "right"}
    assert memory["optimizer"]["optimizer"] == 0 < memory["optimizer"]["host_optimizer"]
    assert 0 < memory["half of the optimizer"]["optimizer"] < memory["nothing"]["optimizer"]
    for name in _TRAINED:
        part = results[name]
        assert part["tokens_per_s"] > 0 and part["memory_gib"]["peak"] > part["memory_gib"]["weights"] > 0
        assert {"update", "head", "body", "optimizer", "export"} == part["seconds"].keys()
        assert {"weights_first", "stash", "recompute"} <= part["head_seconds"].keys()
        assert {"weights_first", "stash", "recompute", "naive"} == part["update_seconds"].keys()
        assert {"weights_first", "stash", "recompute"} == part["times_naive"].keys() and 0 < part[
            "head_share"
        ] < 1
    if not torch.cuda.is_available():
        assert report["missing"].keys() == {"gpu", "fp8", "ipc", "quack"}
        assert results["layers"]["float32"] == {"logp": 0.0, "gradient": 0.0}, "the same layers, twice"
        assert 0 < results["layers"]["float32, shared prompts"]["gradient"] < 1e-5
    for line in (*_TRAINED, "missing: fp8", "memory_gib head"):
        assert line in done.stdout


@pytest.mark.proof
def test_the_smoke_form_is_right_on_an_emulated_gpu(tmp_path: Path) -> None:
    """With Transformer Engine, FP8 and bf16. Processes that it starts have no emulated GPU, and no IPC."""
    on_null_cuda.emulated_environment()
    out = tmp_path / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "megatron_gvpo.emulation", str(SCRIPT), "--smoke"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    used("emulated GPU")
    report = json.loads(out.read_text())
    assert report["failed"].keys() == {"offload", "ipc"}
    trained = {f"{name}{fp8}" for name in _TRAINED for fp8 in ("", ", fp8")}
    assert report["results"].keys() == {"head", "layers", "shared", *trained}
    assert all(part["right"] for part in report["results"].values())


def _of_rehearsal(folder: Path, *names: str) -> dict[str, dict[str, float]]:
    on_null_cuda.environment()
    command = [sys.executable, str(REHEARSAL), *names, "--out", str(folder / "rehearsed.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    used("null CUDA")
    results = json.loads((folder / "rehearsed.json").read_text())["results"]
    return {name: result["memory_gib"] for name, result in results.items()}


def test_the_rehearsed_state_is_that_of_the_shapes() -> None:
    """Bytes of each weight: 2 in bfloat16, a gradient in fp32, and Adam's three numbers."""
    updates = [(name, fp8) for name in _TRAINED for fp8 in ("", ", fp8")]
    assert REHEARSED.keys() == {"head", *(f"{name}{fp8}" for name, fp8 in updates)}
    for name, count in zip(_TRAINED, (1_543_714_304, 2_953_543_168), strict=True):
        memory = REHEARSED[name]["memory_gib"]
        for part, size in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
            assert memory[part] == pytest.approx(size * count / 2**30, rel=0.005), (name, part)


def test_the_heads_peak_is_the_committed_one(tmp_path: Path) -> None:
    assert _of_rehearsal(tmp_path, "head") == {
        "head": pytest.approx(REHEARSED["head"]["memory_gib"], rel=0.001)
    }


@pytest.mark.proof
def test_all_rehearsed_peaks_are_the_committed_ones(tmp_path: Path) -> None:
    peaks = _of_rehearsal(tmp_path)
    assert peaks == {
        name: pytest.approx(result["memory_gib"], rel=0.001) for name, result in REHEARSED.items()
    }
