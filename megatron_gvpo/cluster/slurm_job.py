"""The job of `megatron-gvpo slurm`: options of sbatch and containers, and the check of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_gvpo.cluster.job import SHORTEST_NOTICE, Job, check
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import Config

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
SHORT = {"-N": "--nodes", "-n": "--ntasks", "-a": "--array", "-o": "--output", "-t": "--time"}


@dataclass(frozen=True)
class SlurmJob(Job):
    """A job of Slurm."""

    sbatch: tuple[str, ...] = ()  # more options for sbatch, such as --partition=h800


def check_slurm(config: Config, job: SlurmJob, shown: bool = False) -> None:
    """Raises ConfigError for a job that could not run, as `check` does, or that sbatch would refuse."""
    _check_options(job)
    _check_containers(job)
    if "%" in config.output_dir or not config.output_dir.isprintable():
        raise ConfigError(
            f"output_dir={config.output_dir!r}: Slurm expands % in the name of a job's output file, and "
            "allows no line break there; choose a name without them"
        )
    check(config, job, shown)


def _check_options(job: SlurmJob) -> None:
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
        gpus = value.rpartition(":")[2]
        if name == "--gpus-per-node" and gpus.isdecimal() and int(gpus) < job.ranks_per_node:
            raise ConfigError(
                f"--sbatch={option}: the job starts {job.ranks_per_node} ranks on a node, each with a "
                f"GPU; use --ranks-per-node {gpus} instead"
            )
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


def _check_containers(job: SlurmJob) -> None:
    for name, image in (("container", job.container), ("rollout-container", job.rollout_container)):
        if image == "" or (image is not None and is_file(image) and not Path(image).exists()):
            raise ConfigError(f"--{name} {image}: no such file")
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


def is_file(image: str) -> bool:
    """Returns True if `image` is a file's path, False if it names an image in a registry."""
    return image.endswith((".sif", ".sqsh")) or image.startswith(("/", "./", "../"))
