"""`megatron-gvpo slurm`: the Slurm job that trains a configuration."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli import configured
from megatron_gvpo.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_gvpo.cluster.job import Job
    from megatron_gvpo.settings.config import Config


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "slurm",
        help="write or submit a Slurm job that trains",
        description="Write OUTPUT_DIR/slurm/job.sbatch: the job that trains this configuration.",
    )
    configured.add_arguments(parser)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--nodes", required=True, help="nodes of the trainer", **number)
    parser.add_argument(
        "--rollout-nodes",
        default=0,
        help="more nodes, for the rollout servers (default: 0, on the trainer's nodes)",
        **number,
    )
    parser.add_argument(
        "--ranks-per-node", default=8, help="ranks, and GPUs, of a node (default: 8)", **number
    )
    parser.add_argument("--no-gpus", action="store_true", help="train on CPUs, over gloo")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="=--OPTION",
        help="an option of sbatch, such as --sbatch=--partition=h800 or --sbatch=--time=12:00:00; repeatable",
    )
    parser.add_argument(
        "--save-before",
        default=600,
        type=int,
        metavar="SECONDS",
        help="save and requeue this long before the time limit (default: 600)",
    )
    _add_containers(parser)
    _add_earlier(parser)
    configured.add_allow_change(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the script and write nothing")
    what.add_argument("--submit", action="store_true", help="submit the job, too")
    parser.set_defaults(run=run)


def _add_containers(parser: argparse.ArgumentParser) -> None:
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


def _add_earlier(parser: argparse.ArgumentParser) -> None:
    """How the job treats an earlier run in the output directory."""
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume", dest="how", action="store_const", const="--resume", default="", help="continue a run"
    )
    earlier.add_argument(
        "--resume=auto",
        dest="how",
        action="store_const",
        const="--resume=auto",
        help="continue a run, or start one if there is none",
    )
    earlier.add_argument(
        "--overwrite", dest="how", action="store_const", const="--overwrite", help="replace a run"
    )


def run(options: argparse.Namespace) -> int:
    """0: written, shown or submitted; 1: Slurm refused the job. Raises ConfigError."""
    from megatron_gvpo.cluster import slurm
    from megatron_gvpo.cluster.job import check

    config = configured.load(options)
    if options.nproc:
        raise ConfigError(
            f"--nproc {options.nproc}: a job has --nodes times --ranks-per-node processes; leave it out"
        )
    job = _job(options)
    check(config, job, shown=options.dry_run)
    script = slurm.render(config, options.config, job)
    _report(config, job, options.config)
    if options.dry_run:
        print(script, end="")
        return 0
    file = slurm.write(config, script)
    if not config.checkpoint.every:
        print("note: checkpoint.every=0, so a failed node would cost all steps so far", file=sys.stderr)
    if not options.submit:
        print(f"{file}\nsubmit it from here: sbatch {shlex.quote(str(file))}")
        return 0
    return _submit(file, config.output_dir)


def _job(options: argparse.Namespace) -> Job:
    from megatron_gvpo.cluster.job import Job

    return Job(
        nodes=options.nodes,
        rollout_nodes=options.rollout_nodes,
        ranks_per_node=options.ranks_per_node,
        gpus=not options.no_gpus,
        sbatch=tuple(options.sbatch),
        save_before=options.save_before,
        container=options.container,
        rollout_container=options.rollout_container,
        mounts=tuple(options.mount),
        how=options.how,
        allow_change=tuple(options.allow_change),
    )


def _report(config: Config, job: Job, arguments: list[str]) -> None:
    """Tell what the job asks of its nodes beyond the ranks, and what may fail there."""
    from megatron_gvpo.cluster import slurm
    from megatron_gvpo.planner import prediction

    if job.gpus and (started := slurm.started_gpus(config)):
        more = sum(started.values())
        print(
            f"note: the job asks for {job.ranks_per_node + more} GPUs a node: {job.ranks_per_node} for "
            f"ranks and {more}, which are used on the first node alone, for {', '.join(started)}. Where "
            "nodes have fewer, give a smaller --ranks-per-node, or urls",
            file=sys.stderr,
        )
    if job.gpus and (
        excess := prediction.excess(config, job.nodes * job.ranks_per_node, prediction.COMMON_GIB)
    ):
        print(f"warning: on a GPU of 80 GB {excess}", file=sys.stderr)
    if unseen := slurm.unseen(config, arguments, job):
        print(
            f"note: containers see {os.getcwd()} and what --mount names, and these are elsewhere: "
            f"{', '.join(unseen)}",
            file=sys.stderr,
        )


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
