"""Installing without an image: the locks are current, and the wheel resolves with its extras and installs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.paths import ROOT
from packaging.version import Version

from megatron_gvpo import __version__
from megatron_gvpo.core.versions import REFERENCE

sys.path.insert(0, str(ROOT / "benchmarks"))

import resolved_versions

UV = (sys.executable, "-m", "uv")
GPU = "x86_64-manylinux_2_39"  # Ubuntu 24.04, of the trainer's image


def run(*command: str | Path, cwd: Path = ROOT, seconds: float = 300, **more: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | more, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([\w.+]+)", text, re.MULTILINE))


def build(kind: str, source: Path, out: Path) -> Path:
    """Build `kind`, "wheel" or "sdist", of the package in `source`; returns the file."""
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run(sys.executable, "-W", "ignore", "-c", program, cwd=source)
    [built] = out.iterdir()
    return built


@pytest.fixture(scope="module")
def source_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "megatron_gvpo", source / "megatron_gvpo")
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(source_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked source package, as an installer does that finds no wheel."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(source_package, unpacked, filter="data")
    [source] = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_an_index_would_take_both_packages(source_package: Path, wheel: Path):
    """The metadata and the description are valid, and no tracked file of the package is missing."""
    output = run(*UV, "tool", "run", "twine>=6", "check", "--strict", source_package, wheel)
    assert output.count("PASSED") == 2
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if name.startswith("megatron_gvpo/")}
    tracked = set(run("git", "ls-files", "megatron_gvpo").splitlines())
    assert packed >= tracked, "files that the wheel lacks"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The Python of an empty environment."""
    run(*UV, "venv", "--quiet", "--seed", "--python", sys.executable, tmp_path / "empty")
    return tmp_path / "empty" / "bin" / "python"


def test_the_locks_are_current(tmp_path: Path):
    """Locking again changes nothing: they agree with pyproject.toml, constraints.txt and versions.txt."""
    for file in (ROOT / "locks").glob("*.txt"):
        shutil.copy(file, tmp_path)
    run(ROOT / "tools" / "lock.sh", tmp_path)
    for name in ("cpu.txt", "gpu.txt"):
        old, new = (directory.joinpath(name).read_text() for directory in (ROOT / "locks", tmp_path))
        assert new == old, (
            f"locks/{name} is not what tools/lock.sh writes: run it, and commit what it changes"
        )


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_lock_names_hashes_and_no_index_and_pins_what_the_images_get(name: str):
    text = (ROOT / "locks" / f"{name}.txt").read_text()
    packages = pins(text)
    assert len(packages) > 80 and "://" not in text
    for entry in re.split(r"\n(?=\w)", text)[1:]:
        assert "--hash=sha256:" in entry, entry.splitlines()[0]
    constraints = pins((ROOT / "constraints.txt").read_text()) | REFERENCE
    for package, locked in packages.items():
        assert Version(locked) == Version(constraints[package]), package
    assert ("transformer-engine-torch" in packages) == ("flash-attn" in packages) == (name == "gpu")


def test_the_versions_that_were_resolved_together_fit():
    """The committed table: one CUDA, no torch that needs a newer NCCL, the versions of versions.txt."""
    table = json.loads((ROOT / "benchmarks" / "results" / "resolved_versions.json").read_text())
    assert table["images"].keys() == {"trainer", "sglang", "vllm"} and table["nccl"] == REFERENCE["nccl"]
    lock = (ROOT / "locks" / "gpu.txt").read_text()
    assert table["images"]["trainer"] == resolved_versions.pins(lock), "run benchmarks/resolved_versions.py"
    assert resolved_versions.problems(table["images"]) == []


def test_what_was_installed_together_is_imported():
    """The committed outcome of benchmarks/installed_versions.py, for the versions of the table."""
    table = json.loads((ROOT / "benchmarks" / "results" / "resolved_versions.json").read_text())
    assert table["installed"].keys() == table["images"].keys()
    for one in table["installed"].values():
        assert len(one["imported"]) > 4 and one["failed"] == {}


@pytest.mark.parametrize(
    ("package", "changed", "beginning"),
    [
        ("nvidia-nccl-cu13", "99.1", "vllm: its torch needs NCCL 99.1"),
        ("cuda-toolkit", "12.9", "vllm: its torch needs CUDA 12.9"),
        ("transformers", "4.0", "vllm: transformers 4.0"),
        ("vllm", "0.1", "vllm: vllm 0.1"),
        ("nvidia-cudnn-cu12", "9.0", "vllm: nvidia-cudnn-cu12 is for another CUDA"),
    ],
)
def test_versions_that_do_not_fit_are_named(package: str, changed: str, beginning: str):
    table = json.loads((ROOT / "benchmarks" / "results" / "resolved_versions.json").read_text())
    images = table["images"] | {"vllm": table["images"]["vllm"] | {package: changed}}
    [problem] = resolved_versions.problems(images)
    assert problem.startswith(beginning)


def test_no_uv_lock_is_committed():
    assert run("git", "ls-files", "uv.lock", "**/uv.lock") == ""


def test_the_lock_fits_this_python(empty: Path):
    output = run(*UV, "pip", "sync", "--dry-run", "--require-hashes", "--python", empty, "locks/cpu.txt")
    assert f"+ torch=={REFERENCE['torch']}" in output


def test_uv_sync_resolves(tmp_path: Path):
    """Without a lock uv takes the newest versions of pyproject.toml's ranges, megatron-bridge included."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "megatron_gvpo", tmp_path / "megatron_gvpo")
    sync = (*UV, "sync", "--dry-run", "--no-dev", "--group", "bridge", "--python", sys.executable)
    output = run(*sync, cwd=tmp_path, VIRTUAL_ENV="")
    [bridge] = re.findall(r"\+ megatron-bridge==(\S+)", output)
    assert Version(bridge) >= Version(REFERENCE["megatron-bridge"]), "the newest, whenever it was released"


OLDER = {"trackio", "mlflow", "swanlab"}  # need older versions of some packages than constraints.txt has


@pytest.mark.parametrize(
    ("constraints", "left_out"), [("constraints.txt", OLDER), ("megatron_gvpo/versions.txt", set())]
)
def test_the_wheel_resolves_with_its_extras(constraints: str, left_out: set[str], wheel: Path, empty: Path):
    """With all of them at once."""
    [metadata] = importlib.metadata.distributions(path=[str(wheel)])
    extras = set(metadata.metadata.get_all("Provides-Extra") or []) - left_out
    assert {"gpu", "wandb"} <= extras
    requirement = f"megatron-gvpo[{','.join(sorted(extras))}] @ file://{wheel}"
    options = ("--dry-run", "--python", empty, "--constraints", constraints, "--python-platform", GPU)
    output = run(*UV, "pip", "install", *options, requirement)
    for package in ("torch", "megatron-core", "transformer-engine-torch"):
        assert f"+ {package}=={REFERENCE[package]}" in output
    assert "+ wandb==" in output


@pytest.mark.proof
@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_the_wheel_installs_into_an_empty_environment(installer: str, wheel: Path, empty: Path):
    """As docs/howto/install.md says; `doctor` then finds everything that training needs on a CPU."""
    if installer == "uv":
        run(*UV, "pip", "sync", "--require-hashes", "--python", empty, "locks/cpu.txt", seconds=3000)
        run(*UV, "pip", "install", "--no-deps", "--python", empty, wheel)
    else:
        pip = (empty, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt")
        run(*pip, f"megatron-gvpo[wandb] @ file://{wheel}", seconds=3000)
        run(*pip, "--no-deps", "megatron-bridge")
    program = empty.with_name("megatron-gvpo")
    elsewhere = wheel.parent
    assert run(program, "--version", cwd=elsewhere).startswith(f"megatron-gvpo {__version__} (commit ")
    assert "Ready: training can run here." in run(program, "doctor", cwd=elsewhere)
