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
from pathlib import Path

import jinja2

from megatron_gvpo.cluster.job import Job
from megatron_gvpo.config.schema import Config, ConfigError

SECONDS_TO_SUBMIT = 60
SECONDS_TO_SCHEDULE = 10
RANK = ("-m", "megatron_gvpo.cluster.rank")  # what torchrun runs, with a command or a program


class SlurmError(RuntimeError):
    """Slurm does not take the job; its words, and what to do."""


def render(config: Config, given: Sequence[str], job: Job, program: str = "train") -> str:
    """The sbatch script. `given`: the configuration files and overrides, as `train` takes them. `program`:
    what every rank does with them, a command of `megatron-gvpo` or a FILE.py.
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
        command=shlex.join(["megatron-gvpo", *sys.argv[1:]]).replace("\n", " "),  # it is a comment
        job=job,
        options=[_directive(option) for option in job.sbatch],
        name=shlex.quote(Path(config.output_dir).resolve().name),
        output_dir=shlex.quote(config.output_dir),
        config=shlex.join(given),
        program=shlex.join([*RANK, program]),
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


def _directive(option: str) -> str:
    """As it stands behind #SBATCH, which Slurm reads as a shell does: --name=VALUE is one word."""
    name, sign, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if sign else option


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
    """Put the script where its job's outputs will be. Raises ConfigError where that cannot be written."""
    file = Path(config.output_dir) / "slurm" / "job.sbatch"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script)
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir}: cannot write {file}: {error.strerror}") from None
    return file


def submit(script: Path) -> str:
    """Give the script to sbatch; returns the job's number. Raises SlurmError."""
    if shutil.which("sbatch") is None:
        raise SlurmError(
            "sbatch is not here: run this where Slurm's commands are, or there `sbatch "
            f"{shlex.quote(str(script))}`"
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
