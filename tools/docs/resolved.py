"""The page of the versions that were resolved together, from benchmarks/results/resolved_versions.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "resolved_versions.json"
# The packages by which trainer and servers depend on each other.
FIRST = (
    "torch",
    "cuda-toolkit",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "triton",
    "transformers",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "flash-attn",
    "sglang",
    "sglang-kernel",
    "vllm",
    "flashinfer-python",
    "xgrammar",
    "numpy",
    "pydantic",
)


def page() -> str:
    versions = json.loads(FILE.read_text())
    images: dict[str, dict[str, str]] = versions["images"]
    first = [name for name in FIRST if any(name in packages for packages in images.values())]
    rest = sorted({name for packages in images.values() for name in packages} - set(first))
    head = _HEAD.format(**versions)
    parts = [head, _table(first, images), "## Installed together", _installed(versions.get("installed", {}))]
    return "\n\n".join([*parts, "## All others", _table(rest, images)]) + "\n"


def _installed(images: dict[str, dict[str, Any]]) -> str:
    rows = [
        f"| {name} | {one['date']} | {one['packages']} | {one['gigabytes']} | "
        + ", ".join(f"`{module}`" for module in one["imported"])
        + " | "
        + "; ".join(f"`{module}`: {problem}" for module, problem in one["failed"].items())
        + " |"
        for name, one in images.items()
    ]
    head = ["| image | date | packages | GB | imported | failed |", "|---|---|---|---|---|---|"]
    return "\n".join([_INSTALLED, "", *head, *rows])


def _table(names: list[str], images: dict[str, dict[str, str]]) -> str:
    rows = [f"| `{name}` | " + " | ".join(p.get(name, "") for p in images.values()) + " |" for name in names]
    return "\n".join(["| package | " + " | ".join(images) + " |", "|---" * (len(images) + 1) + "|", *rows])


_INSTALLED = """`benchmarks/installed_versions.py` installed the packages of these images into an empty
environment, with the NCCL of `versions.txt`, and imported what has compiled parts. In the driver's place was
a library of functions that report no device. Transformer Engine and flash-attn, which are compiled at
installation, were left out."""

_HEAD = """# Versions resolved together

Generated from `benchmarks/results/resolved_versions.json`, which `benchmarks/resolved_versions.py` wrote on
{date}: for each GPU image, the versions of all its packages that the package index resolved together, for
Python {python} on `{platform}`. `trainer` is `locks/gpu.txt`; `sglang` and `vllm` are their releases. The
engines' own images, on which the rollout images are built, may hold other versions of what is not pinned.

One CUDA fits all: every torch here is built for the same toolkit. The torch of each image asks for an NCCL of
its own. The one of `versions.txt`, {nccl}, is installed over it in all images, and is at least as new."""
