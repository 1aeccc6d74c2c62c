"""Rehearses device_check.py at its true shapes on the null CUDA, and keeps the peaks of memory.

    python benchmarks/device_rehearsal.py            # writes results/device_check_rehearsed.json
    python benchmarks/device_rehearsal.py NAME...    # only these checks, as device_check.py names them

It runs device_check.py's check of the head, and the first update of each of that program's models, which is
the update whose memory that program measures. Nothing is computed, so there are no values and no seconds.
`memory_gib` has the same names as in the GPU's result (docs/howto/gpus.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_gvpo.planner.prediction import reservable_gib
from megatron_gvpo.planner.workload import gpu
from megatron_gvpo.rehearsal.nullcuda import counters
from megatron_gvpo.rehearsal.nullcuda.devices import DEVICES, GIB
from megatron_gvpo.rehearsal.process import environment_of_ranks

RESULT = Path(__file__).parent / "results" / "device_check_rehearsed.json"
GPU = "h100"
RECIPES = {"": None, ", fp8": "tensorwise"}  # by the end of the check's name in device_check.py


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="checks (default: all)")
    parser.add_argument("--out", type=Path, help="default: the committed result; none with names")
    args = parser.parse_args()
    if not counters.is_loaded():
        usable = round(reservable_gib(gpu(GPU).memory_gib, colocated=False) * GIB)
        variables = environment_of_ranks(DEVICES[GPU], 1, usable)
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | variables)
    os.environ.pop("LD_PRELOAD", None)  # the library is loaded here; Triton's compilers do not need it
    report = {"gpu": DEVICES[GPU].name, "is_rehearsed": True, "results": rehearsed(args.names)}
    print(json.dumps(report, indent=1))
    if (out := args.out or (None if args.names else RESULT)) is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")


def rehearsed(names: list[str]) -> dict[str, Any]:
    """The memory of each check, in GiB. `names`: the checks to run; empty: all."""
    from megatron_gvpo.rehearsal.world import FakeWorld

    world = FakeWorld()  # before megatron-core is imported
    checks, clean_up = _checks()
    if unknown := set(names) - checks.keys():
        sys.exit(f"error: {', '.join(sorted(unknown))}: no such check; there are {'; '.join(checks)}")
    results: dict[str, Any] = {}
    for name in names or checks:
        print(f"{name} ...", file=sys.stderr, flush=True)
        world.join(0, 1)
        results[name] = {"memory_gib": checks[name]()}
        clean_up()
    return results


def _checks() -> tuple[dict[str, Callable[[], dict[str, float]]], Callable[[], None]]:
    """Return, by name, functions that measure a check's GiB, and the function to call after each check."""
    import device_check
    from lib.device import head, model

    from megatron_gvpo.rehearsal import made_model, stand_ins

    def save_shape(folder: Path, shape: dict[str, Any]) -> None:
        """Write the model's files, with zeros as weights, which take no room on the disk."""
        import transformers

        transformers.Qwen2Config(
            **shape, max_position_embeddings=2048, dtype="bfloat16", architectures=["Qwen2ForCausalLM"]
        ).save_pretrained(folder)
        made_model.fill(folder)

    def of_update(shape: dict[str, Any], recipe: str | None) -> dict[str, float]:
        _, _, outcome = device_check.first_update(shape, False, recipe)
        return device_check.memory_of(outcome)

    device_check.save_model = save_shape
    stand_ins.install(made_weights=True)
    checks: dict[str, Callable[[], dict[str, float]]] = {"head": lambda: head.head(False)["memory_gib"]}
    for end, recipe in RECIPES.items():
        for name, shape in model.SHAPES.items():
            checks[name + end] = partial(of_update, shape, recipe)
    return checks, model.clean_up


if __name__ == "__main__":
    main()
