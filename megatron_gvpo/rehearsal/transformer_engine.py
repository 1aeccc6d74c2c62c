"""Finds Transformer Engine, or compiles its torch extension into the cache if it is missing.

The extension is C++ alone, so a compiler and headers are enough. It is compiled without optimisation, because
a rehearsal spends its time elsewhere: seven minutes on one core. Do not train with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from megatron_gvpo.core.versions import REFERENCE
from megatron_gvpo.rehearsal.nullcuda.build import (
    NullCudaError,
    cache,
    compiler,
    headers,
    install,
    run,
    site_packages,
)

_EXTENSION = "transformer_engine_torch"
# Transformer Engine imports these for exports to ONNX.
_ONNX = ("onnxscript", "onnx", "onnx-ir", "ml-dtypes")
_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda")


@dataclass(frozen=True)
class TransformerEngine:
    package: Path  # the folder transformer_engine
    path: Path | None  # directory to add to Python's path; None: it is installed


def find() -> TransformerEngine | None:
    """The installed Transformer Engine, or the one in the cache; None where neither has its extension."""
    spec = find_spec("transformer_engine")
    if spec is not None and spec.submodule_search_locations:
        package = Path(spec.submodule_search_locations[0])
        if any(package.parent.glob(f"{_EXTENSION}*.so")) or any(package.rglob(f"{_EXTENSION}*.so")):
            return TransformerEngine(package, None)
    folder = _folder()
    if (folder / _file()).is_file():
        return TransformerEngine(folder / "transformer_engine", folder)
    return None


def build(report: Callable[[str], None]) -> TransformerEngine:
    """Download Transformer Engine and compile its extension, unless that is done; `report` prints progress.

    A build that was stopped is continued; of two builders the second waits for the first. Raises
    NullCudaError if this machine lacks something for it.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "transformer-engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return find() or _build(report)


def _build(report: Callable[[str], None]) -> TransformerEngine:
    include = headers()
    release = REFERENCE["transformer-engine"]
    packages = [f"transformer-engine=={release}", f"transformer-engine-cu13=={release}", *_ONNX]
    folder = install(_folder().name, *packages)
    source = _source(release)
    objects = cache() / f"{_folder().name}-objects"
    objects.mkdir(exist_ok=True)
    gxx, flags = compiler("g++"), _flags(source, include)
    common = objects / "common.h.gch"
    if not common.is_file():
        _compile([gxx, *flags, "-x", "c++-header", str(source / "csrc" / "common.h")], common)
    files = sorted((source / "csrc").rglob("*.cpp"))
    for number, file in enumerate(files, 1):
        out = objects / (str(file.relative_to(source / "csrc")).replace("/", "_") + ".o")
        if not out.is_file():
            report(f"compiling {number} of {len(files)}: {file.name}")
            _compile([gxx, "-include", str(common.with_suffix("")), *flags, "-c", str(file)], out)
    lib, core = site_packages() / "torch" / "lib", folder / "transformer_engine" / "wheel_lib"
    linked: list[str | Path] = [
        *sorted(objects.glob("*.o")),
        f"-L{lib}",
        *(f"-l{name}" for name in _LIBRARIES),
    ]
    part = objects / _file()
    run(
        [gxx, "-shared", "-o", part, *linked, core / "libtransformer_engine.so"],
        "cannot link Transformer Engine's extension",
    )
    os.replace(part, folder / _file())
    shutil.rmtree(objects)
    shutil.rmtree(source)
    return TransformerEngine(folder / "transformer_engine", folder)


def _folder() -> Path:
    """The cache's folder, whose name has the versions that a compiled extension fits."""
    release = REFERENCE["transformer-engine"]
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    return cache() / f"transformer-engine-{release}-torch-{version('torch')}-python{python}"


def _file() -> str:
    return f"{_EXTENSION}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _source(release: str) -> Path:
    """The extension's sources, downloaded once."""
    folder = cache() / f"{_EXTENSION}-{release}"
    if not folder.is_dir():
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        download += ["--no-binary=:all:", "--dest", str(cache()), f"transformer-engine-torch=={release}"]
        run(download, "cannot download the sources of Transformer Engine's extension")
        archive = cache() / f"{folder.name}.tar.gz"
        with tarfile.open(archive) as files:
            files.extractall(cache(), filter="data")
        archive.unlink()
    return folder


def _flags(source: Path, include: list[Path]) -> list[str]:
    from torch.utils.cpp_extension import include_paths

    common = source / "common_headers"
    folders = [common, common / "common", common / "common" / "include", source / "csrc", *include]
    system = [*include_paths(), sysconfig.get_paths()["include"]]
    defined = [f"-DTORCH_EXTENSION_NAME={_EXTENSION}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    flags = ["-std=c++20", "-w", "-O0", "-fPIC", *defined, *(f"-I{folder}" for folder in folders)]
    return [*flags, *(part for folder in system for part in ("-isystem", folder))]


def _compile(command: list[str], out: Path) -> None:
    """Compile one file; a compiler that is stopped leaves no file of that name."""
    part = out.with_name(f"{out.name}.part")
    done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
    if done.returncode:
        raise NullCudaError(f"cannot compile {command[-1]}: {done.stderr.strip()[:300]}")
    os.replace(part, out)
