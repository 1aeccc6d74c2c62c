"""`megatron-gvpo slurm`: renders the sbatch script of a config, then writes, shows or submits it.

The script contains everything that the job does. Its template is `job.sbatch.j2`.
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

from megatron_gvpo.cluster.script import render_script, write_job
from megatron_gvpo.cluster.slurm_job import SlurmJob, is_file
from megatron_gvpo.settings.config import Config

WRITTEN = "#!/bin/bash\n# Written by: megatron-gvpo"  # every script begins with this
SECONDS_TO_SUBMIT = 60
SECONDS_TO_SCHEDULE = 10


class SlurmError(RuntimeError):
    """Slurm refused the job. The message has Slurm's error and advice."""


def render(config: Config, arguments: Sequence[str], job: SlurmJob, program: str = "train") -> str:
    """Returns the sbatch script.

    `arguments`: config files and overrides, as `train` takes them. `program`: the `megatron-gvpo` command or
    the FILE.py that every rank runs with them.
    """
    rollout_image = job.rollout_container or job.container
    return render_script(
        "job.sbatch.j2",
        config,
        arguments,
        job,
        program,
        options=[_directive(option) for option in job.sbatch],
        name=shlex.quote(Path(os.path.realpath(config.output_dir)).name),
        host_python=shlex.quote(sys.executable),
        container=_inside(job.container, job),
        rollout_container=_inside(rollout_image, job),
    )


def _directive(option: str) -> str:
    """Quotes an option for an #SBATCH line. Slurm splits such a line as a shell does."""
    name, sign, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if sign else option


def _inside(image: str | None, job: SlurmJob) -> str:
    """Returns the srun options that run a command inside the container image."""
    if image is None:
        return ""
    mounts = [str(Path.cwd()), *(os.path.abspath(mount) for mount in job.mounts)]
    if image.endswith(".sif"):
        binds = " ".join(f"--bind {shlex.quote(mount)}" for mount in mounts)
        nvidia = "--nv " if job.gpus else ""
        # Slurm signals all processes. One may serve the image's file system (squashfuse) and must not end, so
        # the signal is blocked here. The script unblocks it inside the image.
        return (
            f"env --block-signal=USR1 apptainer exec {nvidia}--pwd {shlex.quote(mounts[0])} {binds} "
            f"{shlex.quote(image)} "
        )
    pairs = shlex.quote(",".join(f"{mount}:{mount}" for mount in mounts))
    directory = shlex.quote(mounts[0])
    if is_file(image):  # pyxis looks for a name that begins with neither / nor . in a registry
        image = os.path.abspath(image)
    return (
        f"--container-image={shlex.quote(image)} --container-mounts={pairs} --container-workdir={directory} "
    )


def write(config: Config, script: str) -> Path:
    """Writes the script to output_dir/slurm/job.sbatch. Raises ConfigError if it cannot be written."""
    return write_job(config, "slurm", "job.sbatch", "a script that `slurm` wrote", WRITTEN, script)


def submit(script: Path) -> str:
    """Submits the script with sbatch and returns the job's number. Raises SlurmError if Slurm refuses it."""
    if shutil.which("sbatch") is None:
        raise SlurmError(
            "there is no sbatch on this machine: run this command where Slurm is installed, or submit the "
            f"script there: `sbatch {shlex.quote(str(script))}`"
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=SECONDS_TO_SUBMIT
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"sbatch did not answer within {SECONDS_TO_SUBMIT} s; `scontrol ping` says why"
        ) from None
    if done.returncode:
        words = done.stderr.strip()
        raise SlurmError(f"{words}\n{_advice(words)} The script is {script}.")
    return done.stdout.strip().split(";")[0]


def never_starts(job: str) -> str | None:
    """Returns the reason why a job that was just submitted can never start, with advice; None if it can."""
    deadline = time.monotonic() + SECONDS_TO_SCHEDULE
    reason = "None"
    while reason == "None" and time.monotonic() < deadline:  # the scheduler has not yet looked at it
        time.sleep(0.2)
        reason = _ask("squeue", "--noheader", "--states=PENDING", "--jobs", job, "--format=%r").split("\n")[0]
    if not reason.startswith(("Partition", "BadConstraints", "AssocMax", "ReqNodeNotAvail", "InvalidQOS")):
        return None
    return f"{reason}. {_advice(reason)}"


def _advice(words: str) -> str:
    """Returns advice to the user about an error or a pending reason of Slurm; empty if there is none."""
    sinfo = _ask("sinfo", "--noheader", "--format=%R (%D nodes of %c CPUs, %G; limit %l)")
    partitions = ", ".join(sinfo.replace("(null)", "no GPUs").splitlines())
    listing = f"This cluster has: {partitions or 'no partitions'}."
    advice = {
        "invalid partition": f"Name one with --sbatch=--partition=NAME. {listing}",
        "time ?limit": f"Give a shorter --sbatch=--time=LIMIT. {listing}",
        "node|partition": f"Ask for less, or for another partition with --sbatch=--partition=NAME. {listing}",
        "account": "Name yours with --sbatch=--account=NAME; `sacctmgr show associations` lists them.",
        "unable to contact": "Slurm's controller is down, or unknown to this machine: see `scontrol ping`.",
    }
    return next((text for key, text in advice.items() if re.search(key, words, re.IGNORECASE)), "")


def _ask(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_TO_SUBMIT
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
