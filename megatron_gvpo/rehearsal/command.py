"""`megatron-gvpo rehearse`: checks the input, has every rank rehearsed in a process, and judges the results."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_gvpo.cluster.planner import workload
from megatron_gvpo.config.checks.parallel_layout import check_layout
from megatron_gvpo.config.schema import Config, ConfigError, load_config, read_model_config
from megatron_gvpo.megatron.model.attention_kernel import Attention, check_attention, has_flash_attention
from megatron_gvpo.rehearsal import advice, made_model, report, transformer_engine
from megatron_gvpo.rehearsal.nullcuda import build
from megatron_gvpo.rehearsal.nullcuda.build import NullCudaError
from megatron_gvpo.rehearsal.nullcuda.devices import CONTEXT_BYTES, DEVICES, GIB, Device
from megatron_gvpo.rehearsal.prediction import predict
from megatron_gvpo.rehearsal.process import environment_of_ranks, run_rank
from megatron_gvpo.rehearsal.rank import Job
from megatron_gvpo.rehearsal.ranks import chosen

# What a GPU holds beside PyTorch's own memory. Nothing measures it here.
NCCL_BYTES = GIB  # communicators' buffers, more with more groups
SERVER_BYTES = 4 * GIB  # a colocated server that sleeps: its context and its CUDA graphs
LARGEST_WORLD = 65536
LARGEST_GIB = 4096
NODE = 8  # GPUs of a node


def run(options: argparse.Namespace) -> int:
    """Rehearse; returns 0 if every rank fits, 1 if one does not or fails. Raises ConfigError for wrong input."""
    if options.build:
        return _build()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        return _rehearse(options, Path(folder))


def _build() -> int:
    """Build what a rehearsal needs, and keep it in the cache. Raises ConfigError."""
    try:
        found = transformer_engine.build(lambda line: print(line, flush=True))
        print(build.build(found.package))
    except NullCudaError as error:
        raise ConfigError(str(error)) from None
    return 0


def _rehearse(options: argparse.Namespace, folder: Path) -> int:
    device = _device(options.gpu)
    files = [word for word in options.config if "=" not in word]
    overrides = [word for word in options.config if "=" in word]
    if not files:
        raise ConfigError("no configuration file given: megatron-gvpo rehearse CONFIG.yaml --world N")
    if not 1 <= options.world <= LARGEST_WORLD:
        raise ConfigError(f"--world {options.world}: must be from 1 to {LARGEST_WORLD}")
    if options.micro_batches is not None and options.micro_batches < 1:
        raise ConfigError(f"--micro-batches {options.micro_batches}: must be at least 1")
    if options.memory is not None and not 0 < options.memory < LARGEST_GIB:
        raise ConfigError(f"--memory {options.memory}: must be above 0 and below {LARGEST_GIB} GiB")
    named = load_config(files, overrides)
    config, added, made = _with_models(files, overrides, named, folder)
    check_layout(config, options.world)
    ranks = chosen(options.ranks, options.rank, config.parallel, options.world)
    capability = divmod(device.capability, 10)
    shape = read_model_config(config.model.path)
    attention = Attention.of(config.model, config.parallel, config.train.deterministic, shape)
    check_attention(attention, capability, has_flash_attention())
    total = device.total_bytes if options.memory is None else round(options.memory * GIB)
    reserves = _reserves(config, options.world)
    usable = total - sum(reserves.values())
    if usable < GIB:
        raise ConfigError(
            f"--memory {options.memory}: {usable / GIB:.2g} GiB are left beside {', '.join(reserves)}"
        )
    variables = environment_of_ranks(device, min(options.world, NODE), usable)
    jobs = [
        Job(files, [*overrides, *added], rank, options.world, options.micro_batches, made) for rank in ranks
    ]
    found = [run_rank(job, variables, folder) for job in jobs]
    gpu = workload.gpu({"a100": "a800"}.get(options.gpu, options.gpu))
    fullest = max(found, key=_highest)
    result = {
        "model": named.model.path,
        "gpu": device.name,
        "world": options.world,
        "memory_gib": total / GIB,
        "usable_gib": usable / GIB,
        "reserves_gib": {name: size / GIB for name, size in reserves.items()},
        "ranks": found,
        "fullest": fullest["rank"],
        "predicted": predict(config, options.world, options.micro_batches),
        "bounds": [
            line
            for phase in fullest["phases"]
            if (line := advice.bounds(phase, gpu)) and "update" in phase["name"]
        ],
    }
    fits = not any(phase["out_of_memory"] for rank in found for phase in rank["phases"])
    result["fits"], result["verdict"] = fits, _verdict(config, found, fullest, usable)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        report.show(result)
    return 0 if fits else 1


def _device(name: str) -> Device:
    if name.lower() not in DEVICES:
        raise ConfigError(f"--gpu {name}: unknown; known are {', '.join(DEVICES)}")
    return DEVICES[name.lower()]


def _with_models(
    files: list[str], overrides: list[str], named: Config, folder: Path
) -> tuple[Config, list[str], list[str]]:
    """The configuration with made directories for models without weights; what was overridden; those directories."""
    paths = {"model.path": named.model.path}
    if (critic := named.algorithm.critic) is not None and critic.path is not None:
        paths["algorithm.critic.path"] = critic.path
    if named.teacher is not None and named.teacher.server is None:
        paths["teacher.path"] = named.teacher.path
    directories = {key: made_model.prepare(path, key, folder / key) for key, path in paths.items()}
    added = [f"{key}={path}" for key, path in directories.items()] + [f"output_dir={folder / 'out'}"]
    made = [str(path) for path in directories.values() if folder in path.parents]
    return load_config(files, [*overrides, *added]), added, made


def _reserves(config: Config, world: int) -> dict[str, int]:
    reserves = {"CUDA's context": CONTEXT_BYTES}
    if world > 1:
        reserves["NCCL"] = NCCL_BYTES
    if config.rollout.servers.colocated:
        reserves["a sleeping server"] = SERVER_BYTES
    return reserves


def _highest(rank: dict[str, Any]) -> float:
    """What orders ranks by their memory: those that ran out of it come last."""
    phases = rank["phases"]
    return 1e9 if phases[-1]["out_of_memory"] else max(phase["reserved"] for phase in phases)


def _verdict(config: Config, ranks: list[dict[str, Any]], fullest: dict[str, Any], usable: int) -> str:
    last = fullest["phases"][-1]
    if last["out_of_memory"]:
        change = advice.remedy(config, fullest["parts"], last["name"])
        return f"rank {fullest['rank']} runs out of memory in the phase {last['name']}: {last['out_of_memory']}\n{change}"
    highest = max(phase["reserved"] for rank in ranks for phase in rank["phases"])
    return f"it fits: PyTorch reserves at most {highest:.1f} of {usable / GIB:.1f} GiB"
