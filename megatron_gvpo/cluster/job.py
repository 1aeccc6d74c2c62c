"""The cluster job of `megatron-gvpo slurm`, and checks that refuse a job that cannot run before it queues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.preflight import preflight
from megatron_gvpo.config.schema import Config

SHORTEST_NOTICE = 120  # seconds; Slurm may send its signal up to a minute early
# sbatch options that the script sets itself, each with the option that a user should change instead.
OWN = {
    "--nodes": "--nodes and --rollout-nodes",
    "--ntasks": "--ranks-per-node",
    "--ntasks-per-node": "--ranks-per-node",
    "--array": "a job for each configuration",
    "--output": "output_dir",
    "--open-mode": "output_dir",
    "--signal": "--save-before",
    "--requeue": "nothing: it is",
    "--no-requeue": "scancel",
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
    how: Literal["", "--resume", "--overwrite"] = ""  # `train`'s option at the first start


def check(config: Config, job: Job) -> None:
    """Raises ConfigError for a job that could not run, so that it does not wait in a queue first."""
    if job.nodes < 1 or job.rollout_nodes < 0 or job.ranks_per_node < 1:
        raise ConfigError("--nodes and --ranks-per-node must be at least 1, --rollout-nodes at least 0")
    if job.save_before < SHORTEST_NOTICE:
        raise ConfigError(f"--save-before {job.save_before}: at least {SHORTEST_NOTICE} seconds")
    _check_options(job)
    _check_containers(config, job)
    if "%" in config.output_dir or not config.output_dir.isprintable():
        raise ConfigError(
            f"output_dir={config.output_dir!r}: Slurm replaces what follows a % in the names of a job's "
            "outputs, and takes no line breaks; choose a name without"
        )
    preflight(config, "slurm", job.nodes * job.ranks_per_node, fresh=not job.how)
    servers = config.rollout.servers
    if not config.rollout.uses_servers:
        if job.rollout_nodes:
            raise ConfigError(
                f"--rollout-nodes {job.rollout_nodes}: rollout.engine={config.rollout.engine} generates in "
                "the trainer's own processes; choose rollout.engine=sglang or vllm"
            )
    elif servers.urls:
        raise ConfigError("rollout.servers.urls: leave it out, the job starts its own servers and knows them")
    elif job.gpus and servers.count * servers.tp > job.ranks_per_node:
        raise ConfigError(
            f"rollout.servers.count={servers.count} x rollout.servers.tp={servers.tp} needs more than the "
            f"{job.ranks_per_node} GPUs of a node (--ranks-per-node)"
        )
    elif job.gpus and job.rollout_nodes and servers.colocated:
        raise ConfigError(
            f"rollout.servers.colocated=true: with --rollout-nodes {job.rollout_nodes} the servers have GPUs "
            "of their own; leave it out"
        )
    elif job.gpus and not job.rollout_nodes and not servers.colocated:
        raise ConfigError(
            "rollout.servers.colocated=false: without --rollout-nodes the servers are on the trainer's GPUs, "
            "which cannot hold both at once. Let them take turns, rollout.servers.colocated=true with "
            "rollout.weights.transport=shared, or give them nodes"
        )


def _check_options(job: Job) -> None:
    for option in job.sbatch:
        if not option.startswith("-"):
            raise ConfigError(f"--sbatch={option}: sbatch's options begin with -, as --sbatch=--{option}")
        if not option.isprintable():
            raise ConfigError(f"--sbatch={option!r}: an option is one line; repeat --sbatch for another")
        name, value = _parsed(option)
        if name in OWN:
            raise ConfigError(f"--sbatch={option}: the job says {name} itself; for this there is {OWN[name]}")
        if name == "--time" and 0 < (_seconds(value) or 0) <= job.save_before:
            raise ConfigError(
                f"--sbatch={option}: {job.save_before} s before this limit the job saves and starts again, "
                f"which would be at once; give it longer, or less --save-before (at least {SHORTEST_NOTICE})"
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
            raise ConfigError(f"--mount {mount}: without --container the job sees what the nodes see")
        if {*mount} & {",", ":"}:
            raise ConfigError(
                f"--mount {mount}: a directory, which has the same name inside; repeat --mount for another"
            )


def _is_file(image: str) -> bool:
    """Returns True if `image` is a file's path, False if it names an image in a registry."""
    return image.endswith((".sif", ".sqsh")) or image.startswith(("/", "./", "../"))
