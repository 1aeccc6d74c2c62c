"""Transformer Engine's torch extension, which users compile: its sources against the pinned torch and CUDA.

It has C++ alone, so a compiler and headers are enough. NVIDIA's wheels bring the headers, as they do with
NVTE_BUILD_USE_NVIDIA_WHEELS=1 (docs/howto/install.md). Nothing is linked or run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT
from torch.utils.cpp_extension import include_paths

from megatron_gvpo.core.versions import REFERENCE

pytestmark = pytest.mark.proof  # half a minute of a processor for a file
SITE = Path(torch.__path__[0]).parent
VERSION = REFERENCE["transformer-engine-torch"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Install packages without what they depend on; returns their folder."""
    folder = tmp_path_factory.mktemp("wheels")

    def install(*packages: str) -> Path:
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*uv, "--python", sys.executable, *packages], check=True, timeout=1800)
        return folder

    return install


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    pip += ["--no-binary=:all:", "--dest", str(directory), f"transformer-engine-torch=={VERSION}"]
    subprocess.run(pip, check=True, timeout=600)
    [archive] = directory.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(directory, filter="data")
    [folder] = (path for path in directory.iterdir() if path.is_dir())
    return folder


@pytest.mark.parametrize(
    "files", ["*.cpp", "extensions/[a-m]*.cpp", "extensions/[n-z]*.cpp", "extensions/multi_tensor/*.cpp"]
)
def test_its_sources_compile(files: str, source: Path, wheels: Callable[..., Path]) -> None:
    """With the switches of the trainer's image: without NCCL's expert parallelism."""
    release = f"{'.'.join(REFERENCE['cuda-toolkit'].split('.')[:2])}.0"
    headers = wheels(f"nvidia-cuda-crt~={release}", f"nvidia-cuda-cccl~={release}")
    common = source / "common_headers"
    directories = [common, common / "common", common / "common" / "include", source / "csrc"]
    directories += [*(SITE / "nvidia").glob("*/include"), *(headers / "nvidia").glob("*/include")]
    command = ["g++", "-std=c++20", "-w", "-fsyntax-only", "-DTORCH_EXTENSION_NAME=transformer_engine_torch"]
    command += [f"-I{directory}" for directory in directories]
    for directory in (*include_paths(), sysconfig.get_paths()["include"]):
        command += ["-isystem", directory]

    def problem(file: Path) -> str:
        done = subprocess.run([*command, file], capture_output=True, text=True)
        return f"{file.name}: {done.stderr[:1000]}" if done.returncode else ""

    sources = sorted((source / "csrc").glob(files))
    assert len(sources) > 2
    with ThreadPoolExecutor(2) as pool:
        assert [line for line in pool.map(problem, sources) if line] == []


@pytest.mark.parametrize("wheels_alone", [False, True])
def test_its_build_finds_headers_that_a_toolkit_lacks(
    wheels_alone: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own build tools beside a toolkit, which CUDA_HOME names for flash-attn: cuDNN's and NCCL's headers.

    The page's NVTE_BUILD_USE_NVIDIA_WHEELS=1 is needed.
    """
    assert "export NVTE_WITH_NCCL_EP=0" in (page := (ROOT / "docs" / "howto" / "install.md").read_text())
    assert "NVTE_BUILD_USE_NVIDIA_WHEELS=1" in page.split("export NVTE_WITH_NCCL_EP=0")[1].split("\n")[0]
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("NVTE_BUILD_USE_NVIDIA_WHEELS", str(int(wheels_alone)))
    program = "from build_tools.utils import get_cuda_include_dirs as dirs; print(*dirs(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=True
    )
    folders = [Path(line) for line in done.stdout.splitlines()]
    missing = {name for name in ("cudnn.h", "nccl.h") if not any((f / name).exists() for f in folders)}
    assert missing == (set() if wheels_alone else {"cudnn.h", "nccl.h"})


def test_the_core_library_has_what_the_extension_calls(source: Path, wheels: Callable[..., Path]) -> None:
    """The core library comes compiled, in a wheel of its own; its NCCL functions are in the pinned NCCL."""
    core = wheels(f"transformer-engine-cu13=={VERSION}")
    [library] = core.rglob("libtransformer_engine.so")
    [nccl] = (SITE / "nvidia" / "nccl").rglob("libnccl.so.2")

    def symbols(file: Path, kind: str) -> set[str]:
        listed = subprocess.run(["nm", "-DC", kind, file], capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"\b((?:nvte_|nccl[A-Z])\w+)", listed))

    def names(folder: Path, pattern: str) -> set[str]:
        text = "\n".join(file.read_text() for file in folder.rglob(pattern))
        return set(re.findall(r"\b(nvte_\w+)\s*\(", text))

    declared = names(source / "common_headers" / "common" / "include" / "transformer_engine", "*.h")
    called = (names(source / "csrc", "*.cpp") | names(source / "csrc", "*.h")) & declared
    assert len(called) > 100 and called - symbols(library, "--defined-only") == set()
    wanted = {name for name in symbols(library, "--undefined-only") if name.startswith("nccl")}
    assert wanted and wanted - symbols(nccl, "--defined-only") == set()
