"""The page of the versions that were resolved together, from benchmarks/results/resolved_versions.json."""

from __future__ import annotations

import json
from pathlib import Path

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
    found = json.loads(FILE.read_text())
    images: dict[str, dict[str, str]] = found["images"]
    first = [name for name in FIRST if any(name in packages for packages in images.values())]
    rest = sorted({name for packages in images.values() for name in packages} - set(first))
    head = _HEAD.format(**found)
    return "\n\n".join([head, _table(first, images), "## All others", _table(rest, images)]) + "\n"


def _table(names: list[str], images: dict[str, dict[str, str]]) -> str:
    rows = [f"| `{name}` | " + " | ".join(p.get(name, "") for p in images.values()) + " |" for name in names]
    return "\n".join(["| package | " + " | ".join(images) + " |", "|---" * (len(images) + 1) + "|", *rows])


_HEAD = """# Versions resolved together

Generated from `benchmarks/results/resolved_versions.json`, which `benchmarks/resolved_versions.py` wrote on
{date}: for each GPU image, the versions of all its packages that the package index resolved together, for
Python {python} on `{platform}`. `trainer` is `locks/gpu.txt`; `sglang` and `vllm` are their releases. The
engines' own images, on which the rollout images are built, may hold other versions of what is not pinned.

One CUDA fits all: every torch here is built for the same toolkit. The torch of each image asks for an NCCL of
its own. The one of `versions.txt`, {nccl}, is installed over it in all images, and is at least as new."""
