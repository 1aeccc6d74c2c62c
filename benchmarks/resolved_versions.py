"""Resolve the packages of every image together, and check that they fit: one CUDA, one NCCL.

usage: python benchmarks/resolved_versions.py [--out benchmarks/results/resolved_versions.json]

Needs uv and a package index. Nothing is installed: uv reads the packages' metadata, for Python 3.12 on Linux
x86_64. The trainer's packages are those of locks/gpu.txt. The engines' are what their releases resolve to on
the day; the engines' own images may hold others.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import Version

from megatron_gvpo.core.versions import PYTHON_REFERENCE, REFERENCE

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = "x86_64-manylinux_2_39"  # Ubuntu 24.04, of the images
SECONDS = 300.0  # for uv
# vLLM leaves the release of cuda-python open, and that of CUDA 12 overwrites the bindings of CUDA 13.
ASKED = {"vllm": ("cuda-python>=13",)}


def main() -> int:
    """Write the table; returns 1, with a line for each reason, where the packages do not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "resolved_versions.json"
    )
    out: Path = parser.parse_args().out
    images = {"trainer": pins((ROOT / "locks" / "gpu.txt").read_text())}
    images |= {engine: resolved(engine) for engine in ("sglang", "vllm")}
    old = json.loads(out.read_text()) if out.exists() else {"images": {}}
    page = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": PYTHON_REFERENCE,
        "platform": PLATFORM,
        "nccl": REFERENCE["nccl"],
        "images": images,
        # the result of benchmarks/installed_versions.py, if it installed these versions
        "installed": {n: o for n, o in old.get("installed", {}).items() if old["images"][n] == images[n]},
    }
    out.write_text(json.dumps(page, indent=1) + "\n")
    wrong = problems(images)
    print(*wrong or [f"{out.name}: the packages of {', '.join(images)} fit together"], sep="\n")
    return bool(wrong)


def resolved(engine: str) -> dict[str, str]:
    """The versions by package, of the engine's release and of its dependencies.

    Raises RuntimeError with uv's message if uv cannot resolve them.
    """
    options = f"--no-header --no-annotate --prerelease=allow --python-platform {PLATFORM}"
    done = subprocess.run(
        f"{sys.executable} -m uv pip compile - {options} --python-version {PYTHON_REFERENCE}".split(),
        input="\n".join([f"{engine}=={REFERENCE[engine]}", *ASKED.get(engine, ())]),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"uv cannot resolve {engine}=={REFERENCE[engine]}:\n{done.stderr}")
    return pins(done.stdout)


def pins(text: str) -> dict[str, str]:
    """The versions by package, of lines `name==version ; marker`; packages for other systems are left out."""
    lines = re.findall(r"^([\w.-]+)==([\w.+]+)(.*)", text, re.MULTILINE)
    others = re.compile(r"sys_platform == '(?!linux)")
    return {name: version for name, version, marker in lines if not others.search(marker)}


def problems(images: dict[str, dict[str, str]]) -> list[str]:
    """The reasons why trainer and servers cannot work together with these packages, a line each."""
    lines = []
    for image, packages in images.items():
        wanted = packages["nvidia-nccl-cu13"]
        if Version(wanted) > Version(REFERENCE["nccl"]):
            lines.append(f"{image}: its torch needs NCCL {wanted}; versions.txt has {REFERENCE['nccl']}")
        if Version(packages["cuda-toolkit"]) != Version(REFERENCE["cuda-toolkit"]):
            cuda = packages["cuda-toolkit"]
            lines.append(
                f"{image}: its torch needs CUDA {cuda}; versions.txt has {REFERENCE['cuda-toolkit']}"
            )
        python = packages.get("cuda-python")
        if python is not None and Version(python).major != Version(REFERENCE["cuda-toolkit"]).major:
            lines.append(f"{image}: cuda-python {python} is for another CUDA than its torch")
        for package in ("transformers", image):
            if package in REFERENCE and packages[package] != REFERENCE[package]:
                lines.append(f"{image}: {package} {packages[package]}; versions.txt has {REFERENCE[package]}")
        wrong_cuda = sorted(
            name for name in packages if re.fullmatch(r"nvidia-(nccl|cudnn|nvshmem)-cu1[0-2]", name)
        )
        lines += [f"{image}: {name} is for another CUDA" for name in wrong_cuda]
    return lines


if __name__ == "__main__":
    sys.exit(main())
