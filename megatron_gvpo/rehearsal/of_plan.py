"""`megatron-gvpo plan --rehearse`: rehearses a plan's best layouts, and shows the memory that each needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_gvpo.core.signals import leaving_on_signals
from megatron_gvpo.planner.command import Planned, overlay
from megatron_gvpo.planner.search import Candidate
from megatron_gvpo.rehearsal import command
from megatron_gvpo.rehearsal.process import rehearsal_folder

BEST = 3  # layouts that are rehearsed
_SAME_CHIP = {"a800": "a100"}  # the planner's GPUs with other names in a rehearsal


def show(planned: Planned, options: argparse.Namespace) -> int:
    """Rehearse the best layouts and print a line for each; returns 0 if the first of them fits, else 1.

    Raises ConfigError for settings that a run would refuse, RankFailedError for a rank that ends otherwise.
    """
    fits = []
    print(f"\nrehearsed, the first {min(BEST, len(planned.plan.best))}: no value was computed")
    for candidate, result in _rehearsed(planned, options):
        [rank] = [one for one in result["ranks"] if one["rank"] == result["fullest"]]
        updates = [phase for phase in rank["phases"] if phase["name"].endswith("update")]
        peak = max((phase["peak"] for phase in updates), default=0.0)
        print(
            f"  {candidate.layout.name}: peak {peak:.1f} GiB (predicted "
            f"{rank['predicted']['total'] - rank['predicted']['runtime']:.1f}); {result['verdict']}"
        )
        for line in result["bounds"]:
            print(f"    {line}")
        fits.append(result["fits"])
    return 0 if fits[0] else 1


def _rehearsed(planned: Planned, options: argparse.Namespace) -> Iterator[tuple[Candidate, dict[str, Any]]]:
    """Yield the best layouts, each with the result of one rank of every kind."""
    gpu = options.gpu.lower()
    for candidate in planned.plan.best[:BEST]:
        with leaving_on_signals(), rehearsal_folder() as folder:
            files = folder / "run.yaml", folder / "layout.yaml"
            files[0].write_text(yaml.safe_dump(_run(options)))
            files[1].write_text(overlay(candidate, planned.model.layers, planned.work, options))
            arguments = argparse.Namespace(
                config=[str(file) for file in files],
                world=candidate.layout.gpus,
                rank=None,
                ranks="all-kinds",
                gpu=_SAME_CHIP.get(gpu, gpu),
                memory=None,
                micro_batches=None,
                rollouts=None,
            )
            yield candidate, command.rehearsed(arguments, folder)


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """The keys of a configuration that a plan does not have, as far as memory and counts need them."""
    model = Path(options.model)
    directory = model.parent if model.is_file() else model
    values: dict[str, Any] = {
        "output_dir": "run",
        "model": {"path": str(directory)},
        "data": {"train": {"path": "train.jsonl"}, "max_prompt_tokens": options.prompt_tokens},
        "algorithm": options.recipe,
        "rewards": {"components": [{"name": "math"}]},
        "train": {"steps": 1},
        "optimizer": {"lr": 1e-6},
    }
    if options.teacher is not None:
        values["teacher"] = {"path": options.teacher}
    return values
