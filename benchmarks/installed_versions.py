"""Install the packages of one image together, and import the modules that need no driver.

usage: python benchmarks/installed_versions.py trainer|sglang|vllm DIR

DIR is a new environment of several gigabytes. The versions are those of benchmarks/results, in the file
resolved_versions.json, with the NCCL of versions.txt; the outcome is added to that file. Transformer Engine
and flash-attn, which are compiled at installation, are left out. A library of functions that report no device
takes the driver's place.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from megatron_gvpo.core.versions import PYTHON_REFERENCE, REFERENCE

RESULT = Path(__file__).resolve().parent / "results" / "resolved_versions.json"
SECONDS = 1800.0  # for all imports of an image
# Packages that are compiled at installation, and modules that cannot be imported without them.
COMPILED = ("transformer-engine-torch", "transformer-engine", "transformer-engine-cu13", "flash-attn")
# The modules that each image imports: of its compiled packages, and of its engine or trainer.
MODULES = {
    "trainer": ("torch", "triton", "transformers", "megatron.core", "safetensors", "pyarrow"),
    "sglang": (
        *("torch", "sgl_kernel", "flashinfer", "deep_gemm", "torch_memory_saver"),
        *("sglang.srt.server_args", "transformers", "xgrammar"),
    ),
    "vllm": (
        *("torch", "torchaudio", "torchvision", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"),
        *("vllm.cumem_allocator", "vllm.vllm_flash_attn", "flashinfer", "vllm.entrypoints.openai.api_server"),
    ),
}


def main() -> int:
    """Write the outcome; return 1 if a module could not be imported."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("image", choices=MODULES)
    parser.add_argument("dir", type=Path)
    options = parser.parse_args()
    table = json.loads(RESULT.read_text())
    packages = {n: v for n, v in table["images"][options.image].items() if n not in COMPILED}
    packages["nvidia-nccl-cu13"] = REFERENCE["nccl"]
    python = install(packages, options.dir)
    driver = make_driver(options.dir)
    failed = failures(python, MODULES[options.image], driver)
    size = sum(f.stat().st_size for f in options.dir.rglob("*") if f.is_file() and not f.is_symlink())
    table.setdefault("installed", {})[options.image] = {
        "date": datetime.now(UTC).date().isoformat(),
        "packages": len(packages),
        "gigabytes": round(size / 1e9, 1),
        "imported": [module for module in MODULES[options.image] if module not in failed],
        "failed": failed,
    }
    RESULT.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table["installed"][options.image], indent=1))
    return bool(failed)


def install(packages: dict[str, str], directory: Path) -> Path:
    """Returns the Python of a new environment with exactly these packages."""
    uv = (sys.executable, "-m", "uv")
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run((*uv, "venv", "--quiet", "--python", PYTHON_REFERENCE, str(directory)), check=True)
    pinned = [f"{name}=={version}" for name, version in packages.items()]
    command = (*uv, "pip", "install", "--quiet", "--no-deps", "--prerelease=allow", "--python", str(python))
    subprocess.run((*command, *pinned), check=True)
    return python


def make_driver(directory: Path) -> Path:
    """Return a folder with a libcuda: it has all functions of CUDA's header, which report no device."""
    [header] = directory.glob("lib/python*/site-packages/nvidia/cu13/include/cuda.h")
    names = set(re.findall(r"\bcu[A-Z]\w+", header.read_text()))
    folder = directory / "driver"
    folder.mkdir(exist_ok=True)
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names)))  # no device
    subprocess.run(("gcc", "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")), check=True)
    return folder


def failures(python: Path, modules: Sequence[str], driver: Path) -> dict[str, str]:
    """Returns the error of each module that one process of the environment cannot import."""
    program = (
        "import importlib, json, sys\nfailed = {}\n"
        "for module in sys.argv[1:]:\n"
        "    try:\n        importlib.import_module(module)\n"
        "    except Exception as error:\n        failed[module] = f'{type(error).__name__}: {error}'[:300]\n"
        "print(json.dumps(failed))\n"
    )
    done = subprocess.run(
        (str(python), "-W", "ignore", "-c", program, *modules),
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"the imports ended with {done.returncode}:\n{done.stderr[-2000:]}")
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failed


if __name__ == "__main__":
    sys.exit(main())
