"""`megatron-gvpo slurm`: an sbatch script for a configuration, written, shown or submitted.

What the job does is all in the script, and that is `job.sbatch.j2` with the values filled in.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2

from megatron_gvpo.config import Config, ConfigError
from megatron_gvpo.layout import check_layout
from megatron_gvpo.outputs import refuse_earlier_run

SHORTEST_NOTICE = 120  # seconds; Slurm may be a minute early with its signal
SECONDS_TO_SUBMIT = 60
SECONDS_TO_SCHEDULE = 10
TRAIN = "-m megatron_gvpo.cluster.rank train"


@dataclass(frozen=True)
class Job:
    """What the cluster is asked for."""

    nodes: int
    rollout_nodes: int = 0  # more nodes, for the rollout servers; 0: they run beside the trainer
    ranks_per_node: int = 8
    gpus: bool = True  # one for each rank; without, on CPUs over gloo
    sbatch: tuple[str, ...] = ()  # further options of sbatch, such as --partition=h800
    save_before: int = 600  # seconds before the time limit: longer than a step and a checkpoint
    container: str | None = None  # an image for the ranks: a .sif file by Apptainer, others by pyxis
    rollout_container: str | None = None  # another one for the servers
    mounts: tuple[str, ...] = ()  # directories that the containers see, besides the working directory
    how: Literal["", "--resume", "--overwrite"] = ""  # `train`'s option at the first start


class SlurmError(RuntimeError):
    """Slurm does not take the job; its words, and what to do."""


def check(config: Config, job: Job) -> None:
    """Raises ConfigError for a job that could not run, before it waits in a queue."""
    if job.nodes < 1 or job.rollout_nodes < 0 or job.ranks_per_node < 1:
        raise ConfigError("--nodes and --ranks-per-node must be at least 1, --rollout-nodes at least 0")
    if job.save_before < SHORTEST_NOTICE:
        raise ConfigError(f"--save-before {job.save_before}: at least {SHORTEST_NOTICE} seconds")
    for option in job.sbatch:
        if not option.startswith("-"):
            raise ConfigError(f"--sbatch={option}: sbatch's options begin with -, as --sbatch=--{option}")
    for name, image in (("container", job.container), ("rollout-container", job.rollout_container)):
        if image is not None and _is_file(image) and not Path(image).exists():
            raise ConfigError(f"--{name} {image}: no such file")
    check_layout(config, job.nodes * job.ranks_per_node)
    servers = config.rollout.servers
    if config.rollout.engine == "local":
        if job.rollout_nodes:
            raise ConfigError(
                f"--rollout-nodes {job.rollout_nodes}: rollout.engine=local generates in the trainer's own "
                "processes; choose rollout.engine=sglang or vllm"
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
    if job.how == "":
        refuse_earlier_run(config.output_dir)


def render(config: Config, given: Sequence[str], job: Job, program: str = TRAIN) -> str:
    """The sbatch script. `given`: the configuration files and overrides, as `train` takes them. `program`:
    what torchrun runs with them.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_gvpo.cluster", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    python = "python" if job.container else shlex.quote(sys.executable)
    served = config.rollout.engine != "local"
    rollout_image = job.rollout_container or job.container
    return environment.get_template("job.sbatch.j2").render(
        command=shlex.join(["megatron-gvpo", *sys.argv[1:]]),
        job=job,
        name=Path(config.output_dir).name,
        output_dir=shlex.quote(config.output_dir),
        config=shlex.join(given),
        program=program,
        split=job.rollout_nodes > 0,
        served=served,
        servers=config.rollout.servers.count,
        how=job.how or "''",
        python=python,
        rollout_python="python3" if rollout_image else shlex.quote(sys.executable),
        host_python=shlex.quote(sys.executable),
        container=_inside(job.container, job),
        rollout_container=_inside(rollout_image, job),
    )


def _is_file(image: str) -> bool:
    """Otherwise it is the name of an image in a registry."""
    return image.endswith((".sif", ".sqsh")) or image.startswith(("/", "./", "../"))


def unseen(config: Config, given: Sequence[str], job: Job) -> list[str]:
    """`key=path` of what the configuration names outside of the directories that the containers are given."""
    if job.container is None:
        return []
    seen = [Path.cwd(), *(Path(mount).resolve() for mount in job.mounts)]
    named = [("configuration", word) for word in given if "=" not in word]
    named += [("output_dir", config.output_dir), ("model.path", config.model.path)]
    named += [("data.train.path", config.data.train.path)]
    named += [("data.eval.path", config.data.eval.path)] if config.data.eval else []
    return [
        f"{name}={path}"
        for name, path in named
        if not any(Path(path).resolve().is_relative_to(directory) for directory in seen)
    ]


def _inside(image: str | None, job: Job) -> str:
    """What comes between `srun` and a command that is to run in an image."""
    if image is None:
        return ""
    mounts = [str(Path.cwd()), *(os.path.abspath(mount) for mount in job.mounts)]
    if image.endswith(".sif"):
        binds = " ".join(f"--bind {shlex.quote(mount)}" for mount in mounts)
        nvidia = "--nv " if job.gpus else ""
        # Slurm signals all processes, also the one that may be the image's file system (squashfuse): blocked
        # here, in the image unblocked.
        return (
            f"env --block-signal=USR1 apptainer exec {nvidia}--pwd {shlex.quote(mounts[0])} {binds} "
            f"{shlex.quote(image)} "
        )
    pairs = shlex.quote(",".join(f"{mount}:{mount}" for mount in mounts))
    directory = shlex.quote(mounts[0])
    return (
        f"--container-image={shlex.quote(image)} --container-mounts={pairs} --container-workdir={directory} "
    )


def write(config: Config, script: str) -> Path:
    """Put the script where its job's outputs will be."""
    file = Path(config.output_dir) / "slurm" / "job.sbatch"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script)
    return file


def submit(script: Path) -> str:
    """Give the script to sbatch; returns the job's number. Raises SlurmError."""
    if shutil.which("sbatch") is None:
        raise SlurmError(
            f"sbatch is not here: run this where Slurm's commands are, or there `sbatch {script}`"
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=SECONDS_TO_SUBMIT
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"sbatch gave no answer in {SECONDS_TO_SUBMIT} s: see `scontrol ping`") from None
    if done.returncode:
        words = done.stderr.strip()
        raise SlurmError(f"{words}\n{_advice(words)} The script is {script}.")
    return done.stdout.strip().split(";")[0]


def never_starts(job: str) -> str | None:
    """Why a job that was just submitted cannot start as it is, and what to do; None where it can."""
    deadline = time.monotonic() + SECONDS_TO_SCHEDULE
    reason = "None"
    while reason == "None" and time.monotonic() < deadline:  # until the scheduler has looked at it
        time.sleep(0.2)
        reason = _ask("squeue", "--noheader", "--states=PENDING", "--jobs", job, "--format=%r").split("\n")[0]
    if not reason.startswith(("Partition", "BadConstraints", "AssocMax", "ReqNodeNotAvail", "InvalidQOS")):
        return None
    return f"{reason}. {_advice(reason)}"


def _advice(words: str) -> str:
    """What a user can do about Slurm's words."""
    sinfo = _ask("sinfo", "--noheader", "--format=%R (%D nodes of %c CPUs, %G; limit %l)")
    partitions = ", ".join(sinfo.replace("(null)", "no GPUs").splitlines())
    there = f"Here there are: {partitions or 'no partitions'}."
    advice = {
        "invalid partition": f"Name one with --sbatch=--partition=NAME. {there}",
        "time ?limit": f"Give a shorter --sbatch=--time=LIMIT. {there}",
        "node|partition": f"Ask for less, or for another partition with --sbatch=--partition=NAME. {there}",
        "account": "Name yours with --sbatch=--account=NAME; `sacctmgr show associations` lists them.",
        "unable to contact": "Slurm's controller is down or unknown here: see `scontrol ping`.",
    }
    return next((text for key, text in advice.items() if re.search(key, words, re.IGNORECASE)), "")


def _ask(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_TO_SUBMIT
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
