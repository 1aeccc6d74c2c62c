"""The cluster job of `megatron-gvpo slurm`, and checks that refuse a job that cannot run before it queues."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.existing_run import Earlier
from megatron_gvpo.settings.config import Config

SHORTEST_NOTICE = 120  # seconds; Slurm may send its signal up to a minute early
# sbatch options that the script sets itself, each with the option that a user should change instead.
OWN = {
    "--nodes": "--nodes and --rollout-nodes",
    "--ntasks": "--ranks-per-node",
    "--ntasks-per-node": "--ranks-per-node",
    "--array": "one job for each configuration",
    "--output": "output_dir",
    "--open-mode": "output_dir",
    "--signal": "--save-before",
    "--requeue": "no option: a job is always requeued",
    "--no-requeue": "scancel",
}
# `train`'s options for an earlier run, as `preflight` calls them.
EARLIER: dict[str, Earlier] = {
    "": "refuse",
    "--resume": "resume",
    "--resume=auto": "auto",
    "--overwrite": "overwrite",
}
SHORT = {"-N": "--nodes", "-n": "--ntasks", "-a": "--array", "-o": "--output", "-t": "--time"}


@dataclass(frozen=True)
class Job:
    """Resources and options of a Slurm job."""

    nodes: int  # the trainer's nodes
    rollout_nodes: int = 0  # additional nodes for the rollout servers; 0: they run on the trainer's nodes
    ranks_per_node: int = 8
    gpus: bool = True  # one GPU for each rank; False: CPUs over gloo
    sbatch: tuple[str, ...] = ()  # more options for sbatch, such as --partition=h800
    save_before: int = 600  # seconds before the time limit; must exceed a step and a checkpoint
    container: str | None = None  # image for the ranks: Apptainer runs a .sif file, pyxis any other
    rollout_container: str | None = None  # image for the servers; None: the same as `container`
    mounts: tuple[str, ...] = ()  # directories that the containers see, besides the working directory
    # `train`'s option at the first start.
    how: Literal["", "--resume", "--resume=auto", "--overwrite"] = ""
    allow_change: tuple[str, ...] = ()  # the keys that may differ from those of a run that is resumed


def check(config: Config, job: Job, shown: bool = False) -> None:
    """Raises ConfigError for a job that could not run, so that it does not wait in a queue first.

    `shown`: the job is only to be shown, so an earlier run in its output directory is not an obstacle.
    """
    if job.nodes < 1 or job.rollout_nodes < 0 or job.ranks_per_node < 1:
        raise ConfigError("--nodes and --ranks-per-node must be at least 1, --rollout-nodes at least 0")
    if job.save_before < SHORTEST_NOTICE:
        raise ConfigError(f"--save-before {job.save_before}: must be at least {SHORTEST_NOTICE} seconds")
    _check_options(job)
    _check_containers(config, job)
    if "%" in config.output_dir or not config.output_dir.isprintable():
        raise ConfigError(
            f"output_dir={config.output_dir!r}: Slurm expands % in the name of a job's output file, and "
            "allows no line break there; choose a name without them"
        )
    earlier = None if shown else EARLIER[job.how]
    ranks = job.nodes * job.ranks_per_node
    preflight(config, "slurm", ranks, earlier=earlier, allowed=job.allow_change)
    servers = config.rollout.servers
    if not config.rollout.uses_servers:
        if job.rollout_nodes:
            raise ConfigError(
                f"--rollout-nodes {job.rollout_nodes}: rollout.engine={config.rollout.engine} generates in "
                "the trainer's own processes; choose rollout.engine=sglang or vllm"
            )
    elif servers.urls:
        raise ConfigError(
            "rollout.servers.urls: remove this key; the job starts the servers and passes on their addresses"
        )
    elif servers.nodes > 1 and (not job.rollout_nodes or job.rollout_nodes % servers.nodes):
        raise ConfigError(
            f"rollout.servers.nodes={servers.nodes}: servers on several nodes need nodes of their own; "
            f"--rollout-nodes {job.rollout_nodes} must be a multiple of {servers.nodes}"
        )
    elif job.gpus and servers.count * servers.tp // servers.nodes > job.ranks_per_node:
        raise ConfigError(_too_many_servers(config, job))
    elif job.gpus and job.rollout_nodes and servers.colocated:
        raise ConfigError(
            f"rollout.servers.colocated=true: with --rollout-nodes {job.rollout_nodes} the servers have GPUs "
            "of their own; remove this key"
        )
    elif job.gpus and not job.rollout_nodes and not servers.colocated:
        raise ConfigError(
            "rollout.servers.colocated=false: without --rollout-nodes the servers run on the trainer's GPUs, "
            "which cannot hold both at once; set rollout.servers.colocated=true and "
            "rollout.weights.transport=shared, so that they take turns, or give the servers --rollout-nodes"
        )


def _too_many_servers(config: Config, job: Job) -> str:
    """The error for servers that need more GPUs than a node has, with what would do."""
    servers, gpus = config.rollout.servers, job.ranks_per_node
    over = f" / rollout.servers.nodes={servers.nodes}" if servers.nodes > 1 else ""
    if servers.tp // servers.nodes <= gpus:
        most = gpus * servers.nodes // servers.tp
        remedy = f"count is that of each node: at most {most} here, and N nodes have N times as many"
    else:
        remedy = (
            f"a server of {servers.tp} GPUs needs rollout.servers.nodes={math.ceil(servers.tp / gpus)} and "
            "--rollout-nodes"
        )
    return (
        f"rollout.servers.count={servers.count} x rollout.servers.tp={servers.tp}{over} needs more than the "
        f"{gpus} GPUs of a node (--ranks-per-node); {remedy}"
    )


def _check_options(job: Job) -> None:
    for option in job.sbatch:
        if not option.startswith("-"):
            raise ConfigError(
                f"--sbatch={option}: options of sbatch begin with a dash; write --sbatch=--{option}"
            )
        if not option.isprintable():
            raise ConfigError(
                f"--sbatch={option!r}: an option is one line of text; repeat --sbatch for another"
            )
        name, value = _parsed(option)
        if name in OWN:
            raise ConfigError(f"--sbatch={option}: the job sets {name} itself; use {OWN[name]} instead")
        if name == "--time" and 0 < (_seconds(value) or 0) <= job.save_before:
            raise ConfigError(
                f"--sbatch={option}: the job saves and requeues itself {job.save_before} s before this "
                "limit, so it would stop as soon as it starts; give a longer limit, or less --save-before "
                f"(at least {SHORTEST_NOTICE})"
            )


def _parsed(option: str) -> tuple[str, str]:
    """Returns an option's long name and value. sbatch accepts --name=value, --name value and -nvalue."""
    if not option.startswith("--"):
        return SHORT.get(option[:2], option[:2]), option[2:].strip(" =")
    name, _, value = option.replace(" ", "=", 1).partition("=")
    return name, value


def _seconds(limit: str) -> int | None:
    """Converts a Slurm time limit to seconds; None if Slurm would refuse it.

    The formats are m, m:s, h:m:s, days-h, days-h:m and days-h:m:s.
    """
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    if len(parts) > len(units) or not all(part.isdecimal() for part in (days or "0", *parts)):
        return None
    return 86400 * int(days or 0) + sum(int(n) * unit for n, unit in zip(parts, units, strict=False))


def _check_containers(config: Config, job: Job) -> None:
    for name, image in (("container", job.container), ("rollout-container", job.rollout_container)):
        if image == "" or (image is not None and _is_file(image) and not Path(image).exists()):
            raise ConfigError(f"--{name} {image}: no such file")
    if job.rollout_container is not None and not config.rollout.uses_servers:
        raise ConfigError(
            f"--rollout-container {job.rollout_container}: rollout.engine={config.rollout.engine} has no "
            "servers; choose rollout.engine=sglang or vllm, or leave it out"
        )
    for mount in job.mounts:
        if job.container is None and job.rollout_container is None:
            raise ConfigError(
                f"--mount {mount}: needs --container; without one, the job sees the nodes' own files"
            )
        if {*mount} & {",", ":"}:
            raise ConfigError(
                f"--mount {mount}: expected one directory, which has the same path in the container; repeat "
                "--mount for another"
            )


def _is_file(image: str) -> bool:
    """Returns True if `image` is a file's path, False if it names an image in a registry."""
    return image.endswith((".sif", ".sqsh")) or image.startswith(("/", "./", "../"))
