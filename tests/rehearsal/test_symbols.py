"""Every CUDA function that PyTorch, Transformer Engine and Triton ask for has an answer."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import triton
from helpers import on_null_cuda

from megatron_gvpo.rehearsal import transformer_engine
from megatron_gvpo.rehearsal.nullcuda import build, symbols


@pytest.fixture(scope="module")
def library() -> Path:
    return Path(on_null_cuda.environment()["LD_PRELOAD"])


@pytest.fixture(scope="module")
def answered(library: Path) -> set[str]:
    """By readelf, while the build reads the same tables with nm."""
    listed = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", library], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"FUNC\s+GLOBAL\s+DEFAULT\s+\d+ (\w+)", listed.stdout))


def _undefined(library: Path) -> set[str]:
    listed = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", library], capture_output=True, text=True, check=True
    )
    names = set(re.findall(r"\bUND (\w+)", listed.stdout))
    return {
        n
        for n in names
        if re.match(r"__cuda|cuda[A-Z]|cu[A-Z]|cublas|nvrtc", n) and not n.startswith("cuFile")
    }


def test_of_pytorch_and_transformer_engine(answered: set[str]) -> None:
    installation = transformer_engine.find()
    assert installation is not None
    core = installation.package / "wheel_lib" / "libtransformer_engine.so"
    [extension] = installation.package.parent.glob("transformer_engine_torch*.so")
    undefined = set().union(*(_undefined(file) for file in [*build.pytorch_libraries(), core, extension]))
    assert (
        len(undefined) > 250
        and {"cudaMalloc", "cublasLtMatmul", "nvrtcCompileProgram", "__cudaRegisterFunction"} <= undefined
    )
    left = undefined - answered
    assert left and all(
        symbols.real(name) for name in left
    )  # descriptions of matrices, versions, texts of errors


def test_of_triton(answered: set[str]) -> None:
    """Its driver is C, compiled at the first use; it looks functions up by name."""
    source = Path(triton.__path__[0], "backends", "nvidia", "driver.c").read_text()
    functions = {re.sub(r"Handle$|_t$", "", name) for name in re.findall(r"\bcu[A-Z][A-Za-z0-9_]+", source)}
    assert "cuLaunchKernelEx" in functions and len(functions) > 15
    assert functions - answered == set()


def test_all_functions_of_the_driver_are_there(answered: set[str]) -> None:
    [header] = (path / "cuda.h" for path in build.headers() if (path / "cuda.h").is_file())
    declared = set(re.findall(r"^CUresult CUDAAPI (\w+)\(", header.read_text(), re.M))
    assert len(declared) > 390 and declared - answered == set()


def test_an_answered_function_is_answered_in_its_newest_version() -> None:
    """The driver's functions are looked up without a version's number, and the newest is found first."""
    text = (build.SOURCES / "driver.c").read_text()
    by_hand = set(re.findall(r"EXPORT CUresult (cu[A-Z]\w+)\(", text))
    [header] = (path / "cuda.h" for path in build.headers() if (path / "cuda.h").is_file())
    numbered = {name for name in symbols.driver_functions(header) if re.search(r"_v\d$", name)}
    newer = {name for name in numbered if re.sub(r"_v\d$", "", name) in by_hand}
    assert len(by_hand) > 30 and newer - by_hand == set()


def test_what_is_not_asked_for_is_not_answered(answered: set[str]) -> None:
    """A function that nobody wrote or asked for must not succeed by mistake."""
    assert not {"cudaGraphInstantiate", "cudnnCreate", "cusolverDnCreate", "ncclCommInitRank"} & answered


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cudaMalloc(void **out, size_t bytes)", "cudaMalloc(void *out, size_t bytes)"),
        ("cudaFree(void *address)", "cudaFree(void *address, int device)"),
    ],
)
def test_the_compiler_refuses_a_signature_that_is_not_the_headers(
    right: str, wrong: str, tmp_path: Path
) -> None:
    for file in build.SOURCES.glob("*.h"):
        shutil.copy(file, tmp_path)
    text = (build.SOURCES / "memory.c").read_text()
    assert right in text
    for name, source in (("right", text), ("wrong", text.replace(right, wrong))):
        (tmp_path / f"{name}.c").write_text(source)
    command = ["gcc", "-fsyntax-only", "-w", f"-I{tmp_path}", *(f"-I{path}" for path in build.headers())]
    assert subprocess.run([*command, tmp_path / "right.c"]).returncode == 0
    done = subprocess.run([*command, tmp_path / "wrong.c"], capture_output=True, text=True)
    assert done.returncode and "conflicting types" in done.stderr
