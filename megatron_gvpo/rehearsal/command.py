"""`megatron-gvpo rehearse`: checks the input, lets processes rehearse ranks, and judges the results."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.gpu_packages import check_delta_nets
from megatron_gvpo.core.signals import leaving_on_signals
from megatron_gvpo.megatron.model.attention_kernel import Attention, check_attention, has_flash_attention
from megatron_gvpo.planner import workload
from megatron_gvpo.planner.architecture import CONTEXT_BYTES, NCCL_BYTES
from megatron_gvpo.planner.prediction import (
    SERVER_GIB,
    has_sleeping_server,
    predict,
    reservable_gib,
    smallest_gpu_gib,
    usable_gib,
)
from megatron_gvpo.rehearsal import made_model, report, saved_rows, transformer_engine
from megatron_gvpo.rehearsal.nullcuda import build
from megatron_gvpo.rehearsal.nullcuda.build import NullCudaError
from megatron_gvpo.rehearsal.nullcuda.devices import DEVICES, GIB, Device
from megatron_gvpo.rehearsal.process import environment_of_ranks, rehearsal_folder, run_jobs
from megatron_gvpo.rehearsal.rank import RankJob
from megatron_gvpo.settings.config import Config, load_config, split_words
from megatron_gvpo.settings.parallel import ParallelConfig

LARGEST_WORLD = 65536
LARGEST_GIB = 4096
LEAST_GIB = 1.0  # GiB that PyTorch must have: less is not enough for a model with its workspaces
NODE = 8  # GPUs of a node


def run(options: argparse.Namespace) -> int:
    """Rehearse; returns 0 if every rank fits, 1 if one does not or fails. Raises ConfigError."""
    if options.build:
        if options.config:
            raise ConfigError(
                f"--build only compiles, and reads no {options.config[0]}: leave one of them out"
            )
        return _build()
    with leaving_on_signals(), rehearsal_folder() as folder:
        return _rehearse(options, folder)


def _build() -> int:
    """Build the libraries that a rehearsal needs, and keep them in the cache. Raises ConfigError."""
    try:
        engine = transformer_engine.build(lambda line: print(line, flush=True))
        print(build.build(engine.package))
    except NullCudaError as error:
        raise ConfigError(str(error)) from None
    return 0


def _rehearse(options: argparse.Namespace, folder: Path) -> int:
    """Rehearse, and show the result; returns the exit code."""
    result = rehearsed(options, folder)
    print(json.dumps(result, indent=1)) if options.json else report.show(result)
    return 0 if result["fits"] else 1


def rehearsed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Check everything, then rehearse the ranks, one after the other; files go to `folder`.

    Raises ConfigError, and RankFailedError for a rank that ends otherwise.
    """
    device = _device(options.gpu)
    config, job = _checked(options, device, folder)
    ranks = chosen(options.ranks, options.rank, config.parallel, options.world)
    total = workload.gpu(options.gpu).memory_gib if options.memory is None else options.memory
    colocated = has_sleeping_server(config)
    if total < (enough := math.ceil(10 * smallest_gpu_gib(LEAST_GIB, colocated)) / 10):
        raise ConfigError(f"--memory {options.memory}: too small, {enough} GiB would do")
    usable = round(reservable_gib(total, colocated) * GIB)
    variables = environment_of_ranks(device, min(options.world, NODE), usable)
    results = list(run_jobs([replace(job, rank=rank) for rank in ranks], variables, folder))
    for one in results:
        stage = one["role"].get("pp", 0)
        one["predicted"] = predict(config, options.world, options.micro_batches, stage)
    result: dict[str, Any] = {
        "gpu": device.name,
        "world": options.world,
        "memory_gib": total,
        "usable_gib": usable / GIB,
        "reserves_gib": _reserves(total, colocated),
        "ranks": results,
    }
    return result | _judged(config, results, options.gpu, usable)


def _checked(options: argparse.Namespace, device: Device, folder: Path) -> tuple[Config, RankJob]:
    """The configuration, with models that exist, and the common values of its ranks. Raises ConfigError."""
    files, overrides = split_words(options.config)
    if not files:
        raise ConfigError("no configuration file given: megatron-gvpo rehearse CONFIG.yaml --world N")
    if not 1 <= options.world <= LARGEST_WORLD:
        raise ConfigError(f"--world {options.world}: must be from 1 to {LARGEST_WORLD}")
    if options.micro_batches is not None and options.micro_batches < 1:
        raise ConfigError(f"--micro-batches {options.micro_batches}: must be at least 1")
    if options.memory is not None and not 0 < options.memory < LARGEST_GIB:
        raise ConfigError(f"--memory {options.memory}: must be above 0 and below {LARGEST_GIB} GiB")
    if options.rollouts is not None:
        if options.micro_batches is not None:
            raise ConfigError(
                f"--rollouts {options.rollouts} and --micro-batches {options.micro_batches}: give one of "
                "them; an update has all micro-batches of saved rollouts"
            )
        saved_rows.load(options.rollouts)
    config, added, made = _with_models(files, overrides, folder)
    if config.train.head_backend != "auto":
        raise ConfigError(
            f"train.head_backend={config.train.head_backend}: a rehearsal has no stand-in for QuACK's "
            "product; add train.head_backend=auto"
        )
    card = check_layout(config, options.world).policy
    attention = Attention.of(config.model, config.parallel, config.train.deterministic, card)
    major, minor = divmod(device.capability, 10)
    check_attention(attention, (major, minor), has_flash_attention())
    if card.has_delta_nets:
        check_delta_nets(f"model.path={config.model.path}", otherwise="")
    job = RankJob(files, [*overrides, *added], 0, options.world, options.micro_batches, made)
    return config, replace(job, rollouts=options.rollouts)


def _device(name: str) -> Device:
    if name.lower() not in DEVICES:
        raise ConfigError(f"--gpu {name}: unknown; known are {', '.join(DEVICES)}")
    return DEVICES[name.lower()]


def _with_models(files: list[str], overrides: list[str], folder: Path) -> tuple[Config, list[str], list[str]]:
    """The configuration with directories for all models, the overrides for that, and the made directories."""
    named = load_config(files, overrides)
    paths = made_model.paths_of(named)
    directories = {key: made_model.prepare(path, key, folder / key) for key, path in paths.items()}
    added = [f"{key}={path}" for key, path in directories.items()] + [f"output_dir={folder / 'out'}"]
    made = [str(path) for path in directories.values() if folder in path.parents]
    return load_config(files, [*overrides, *added]), added, made


def _reserves(total: float, colocated: bool) -> dict[str, float]:
    """GiB of a GPU of `total` GiB that PyTorch cannot have, counted as in `plan` without a measurement."""
    reserves = {"CUDA's context": CONTEXT_BYTES / GIB, "NCCL": NCCL_BYTES / GIB}
    if colocated:
        reserves["a sleeping server"] = SERVER_GIB
    reserves["what a plan leaves free"] = total - usable_gib(total, colocated) - SERVER_GIB * colocated
    return reserves


def _highest(rank: dict[str, Any]) -> float:
    """Orders ranks by their memory: those that ran out of it come last."""
    phases = rank["phases"]
    return 1e9 if phases[-1]["out_of_memory"] else max(phase["reserved"] for phase in phases)


def _judged(config: Config, ranks: list[dict[str, Any]], name: str, usable: int) -> dict[str, Any]:
    """The fullest rank, whether all ranks fit, a text on possible changes, and the bounds of the updates."""
    fullest = max(ranks, key=_highest)
    last = fullest["phases"][-1]
    fits = last["out_of_memory"] is None
    if fits:
        verdict = f"it fits: PyTorch reserves at most {_highest(fullest):.1f} of {usable / GIB:.1f} GiB"
    else:
        where = f"rank {fullest['rank']} runs out of memory in the phase {last['name']}"
        change = report.remedy(config, fullest["parts"], last["name"])
        verdict = f"{where}: {last['out_of_memory']}\nwhat would help: {change}"
    gpu = workload.gpu(name)
    updates = [phase for phase in fullest["phases"] if phase["name"].endswith("update")]
    bounds = [line for phase in updates for line in report.bounds(phase, gpu)]
    return {"fullest": fullest["rank"], "fits": fits, "verdict": verdict, "bounds": bounds}


def chosen(ranks: str | None, rank: int | None, parallel: ParallelConfig, world: int) -> list[int]:
    """The ranks that the options name. Raises ConfigError for a rank that does not exist."""
    if ranks is not None:
        if rank is not None:
            raise ConfigError(f"--rank {rank} and --ranks {ranks}: give one of them")
        return all_kinds(parallel, world)
    if not 0 <= (rank or 0) < world:
        raise ConfigError(f"--rank {rank}: --world {world} has the ranks 0 to {world - 1}")
    return [rank or 0]


def all_kinds(parallel: ParallelConfig, world: int) -> list[int]:
    """The first, the fullest middle and the last pipeline stage; of each, the first and the last rank.

    Megatron numbers pipeline stages last, so a stage's ranks follow each other. Its first and last ranks
    differ in their tensor-parallel shard, their experts, and their part of the optimizer.
    """
    each, last = world // parallel.pp, parallel.pp - 1
    stages = [0, last]
    if parallel.pp > 2:
        sizes = parallel.stage_layers or (1,) * parallel.pp
        layers = [sum(sizes[stage :: parallel.pp]) for stage in range(parallel.pp)]
        stages.append(max(range(1, last), key=layers.__getitem__))
    return sorted({rank for stage in stages for rank in (stage * each, (stage + 1) * each - 1)})
