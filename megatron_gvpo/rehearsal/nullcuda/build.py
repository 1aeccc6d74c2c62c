"""Compiles the null CUDA once, against the installed PyTorch's headers and libraries; keeps it in a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from megatron_gvpo.rehearsal.nullcuda import symbols

SOURCES = Path(__file__).parent
_PYTORCH = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg")
_FLAGS = ("-O1", "-fPIC", "-fvisibility=hidden")


class NullCudaError(Exception):
    """The null CUDA cannot be built or used here; the text has a remedy."""


def cache() -> Path:
    """The cache folder for compiled libraries, which is outside of any repository."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_gvpo" / "rehearsal"


def site_packages() -> Path:
    """The folder in which torch is installed. Raises NullCudaError without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise NullCudaError("torch is not installed")
    return Path(spec.origin).resolve().parent.parent


def pytorch_libraries() -> list[Path]:
    """PyTorch's CUDA libraries. Raises NullCudaError for a build of torch without CUDA."""
    folder = site_packages() / "torch" / "lib"
    files = [folder / f"lib{name}.so" for name in _PYTORCH]
    if missing := [file.name for file in files if not file.is_file()]:
        raise NullCudaError(
            f"torch {version('torch')} is a build without CUDA ({missing[0]} is missing): install PyPI's "
            "torch for Linux, which has it; no GPU is needed"
        )
    return files


def compiler(name: str) -> str:
    """The path of gcc or g++. Raises NullCudaError where it is missing."""
    if (path := shutil.which(name)) is None or shutil.which("nm") is None:
        raise NullCudaError(
            f"{name} and nm are needed to compile, and not found: apt-get install g++ binutils"
        )
    return path


def headers() -> list[Path]:
    """Folders with the headers of PyTorch's CUDA, and with those of NVIDIA's packages crt and cccl.

    PyTorch does not depend on these two: they are downloaded into the cache (19 MB) where they are missing.
    Raises NullCudaError if that fails.
    """
    folders = sorted((site_packages() / "nvidia").glob("*/include"))
    if not any((folder / "cuda_runtime_api.h").is_file() for folder in folders):
        raise NullCudaError(f"{site_packages()}/nvidia has no CUDA headers: install PyPI's torch for Linux")
    if any((folder / "crt" / "host_defines.h").is_file() for folder in folders):
        return folders
    release = ".".join(version("nvidia-cuda-runtime").split(".")[:2])
    packages = [f"nvidia-cuda-{name}~={release}.0" for name in ("crt", "cccl")]
    return [*folders, *install(f"headers-{release}", *packages).glob("nvidia/*/include")]


def install(name: str, *packages: str) -> Path:
    """Install packages, without their dependencies, into the folder `name` of the cache, once.

    Raises NullCudaError if the installer fails.
    """
    folder = cache() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as part:
        target = Path(part) / name
        pip = ["pip", "install", "--quiet", "--no-deps", "--target", str(target), *packages]
        run([sys.executable, "-m", *pip], f"cannot install {' '.join(packages)}")
        put(target, folder)
    return folder


def build(transformer_engine: Path | None = None) -> Path:
    """Return the library's path; compile it in three seconds if the cache does not have it.

    `transformer_engine`: the installed package, whose core library asks for more functions.
    Raises NullCudaError if this machine lacks something for the build.
    """
    libraries = pytorch_libraries()
    if transformer_engine is not None:
        libraries.append(transformer_engine / "wheel_lib" / "libtransformer_engine.so")
    include = headers()
    folder = cache() / f"nullcuda-{_key(libraries)}"
    library = folder / "libcuda.so.1"
    if library.is_file():
        return library
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as part:
        _compile(Path(part), include, libraries, transformer_engine)
        put(Path(part) / "out", folder)
    return library


def _key(libraries: Sequence[Path]) -> str:
    """A digest of the sources here and of the libraries that are answered; a new digest means a new build."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.glob("*.[chp]*")):
        digest.update(file.read_bytes())
    for library in libraries:
        digest.update(f"{library} {library.stat().st_size}".encode())
    return digest.hexdigest()[:12]


def _compile(
    folder: Path, include: Sequence[Path], libraries: Sequence[Path], transformer_engine: Path | None
) -> None:
    gcc, gxx = compiler("gcc"), compiler("g++")
    switches = [f"-I{SOURCES}", *(f"-I{path}" for path in include)]
    sources = [(gcc, file) for file in sorted(SOURCES.glob("*.c"))]
    if transformer_engine is not None:
        sources.append((gxx, SOURCES / "attention.cpp"))
        switches.append(f"-I{transformer_engine / 'common' / 'include'}")
    objects = [_object(program, file, folder, switches) for program, file in sources]
    by_hand = set().union(*(symbols.defined_in(file) for file in objects))
    header = next(path / "cuda.h" for path in include if (path / "cuda.h").is_file())
    undefined = set().union(*(symbols.asked_for(library) for library in libraries))
    stubs = folder / "stubs.c"
    stubs.write_text(symbols.stubs(undefined | symbols.driver_functions(header), by_hand))
    objects.append(_object(gcc, stubs, folder, switches))
    (folder / "out").mkdir()
    shared: list[str | Path] = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", folder / "out" / "libcuda.so.1"]
    run([gxx, *shared, *objects, "-lpthread", "-ldl"], "cannot link the null CUDA")


def _object(program: str, file: Path, folder: Path, switches: Sequence[str]) -> Path:
    standard = "-std=c++20" if file.suffix == ".cpp" else "-std=gnu11"
    out = folder / f"{file.stem}.o"
    run([program, standard, *_FLAGS, *switches, "-c", file, "-o", out], f"cannot compile {file.name}")
    return out


def run(command: Sequence[str | Path], problem: str) -> None:
    """Run a command. Raises NullCudaError with `problem` and the command's last line if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [
            done.stderr.strip()[-300:]
        ]
        raise NullCudaError(f"{problem}: {lines[-1] if lines else f'exit code {done.returncode}'}")


def put(built: Path, folder: Path) -> None:
    """Move a build into the cache, completely or not at all; another process may have been faster."""
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
