"""`megatron-gvpo slurm`: the Slurm job that trains a configuration."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from megatron_gvpo.cli import configured, job_options


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "slurm",
        help="write or submit a Slurm job that trains",
        description="Write OUTPUT_DIR/slurm/job.sbatch: the job that trains this configuration.",
    )
    job_options.add_arguments(parser)
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="=--OPTION",
        help="an option of sbatch, such as --sbatch=--partition=h800 or --sbatch=--time=12:00:00; repeatable",
    )
    job_options.add_save_before(parser, "save and requeue this long before the time limit (default: 600)")
    parser.add_argument(
        "--container", metavar="IMAGE", help="image to run in: FILE.sif with Apptainer, any other with pyxis"
    )
    parser.add_argument(
        "--rollout-container", metavar="IMAGE", help="image of the servers (default: the same)"
    )
    parser.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="DIR",
        help="a directory that the containers see; repeatable",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the script and write nothing")
    what.add_argument("--submit", action="store_true", help="submit the job, too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: written, shown or submitted; 1: Slurm refused the job. Raises ConfigError."""
    from megatron_gvpo.cluster import slurm
    from megatron_gvpo.cluster.job import unseen
    from megatron_gvpo.cluster.slurm_job import SlurmJob, check_slurm

    config = configured.load(options)
    job = SlurmJob(
        **job_options.job_fields(options),
        sbatch=tuple(options.sbatch),
        container=options.container,
        rollout_container=options.rollout_container,
        mounts=tuple(options.mount),
    )
    check_slurm(config, job, shown=options.dry_run)
    script = slurm.render(config, options.config, job)
    job_options.note(config, job)
    if outside := unseen(config, options.config, job):
        print(
            f"note: containers see {os.getcwd()} and what --mount names, and these are elsewhere: "
            f"{', '.join(outside)}",
            file=sys.stderr,
        )
    if options.dry_run:
        print(script, end="")
        return 0
    file = slurm.write(config, script)
    job_options.note_no_checkpoints(config)
    if not options.submit:
        print(f"{file}\nsubmit it from here: sbatch {shlex.quote(str(file))}")
        return 0
    return _submit(file, config.output_dir)


def _submit(file: Path, output_dir: str) -> int:
    """Submit the script, and say where its output goes; returns the exit code."""
    from megatron_gvpo.cluster import slurm

    try:
        number = slurm.submit(file)
    except slurm.SlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"job {number}; its output: {output_dir}/slurm/{number}.out")
    if reason := slurm.never_starts(number):
        print(f"error: the job waits, and will not start: {reason} (scancel {number})", file=sys.stderr)
        return 1
    return 0
