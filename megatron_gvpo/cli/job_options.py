"""The arguments of the commands that write a cluster's job: `slurm`, `k8s` and `sky`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli import configured
from megatron_gvpo.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_gvpo.cluster.job import Job
    from megatron_gvpo.cluster.pods import PodJob
    from megatron_gvpo.settings.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the configuration, the job's size, and how it treats an earlier run."""
    configured.add_arguments(parser, argparse.SUPPRESS)
    number: dict[str, Any] = {"type": configured.integer, "metavar": "N"}
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
    configured.add_allow_change(parser)


def add_save_before(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--save-before", default=600, type=configured.integer, metavar="SECONDS", help=meaning
    )


def job_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `Job` that `add_arguments` has options for. Raises ConfigError for --nproc."""
    if options.nproc:
        raise ConfigError(
            f"--nproc {options.nproc}: a job has --nodes times --ranks-per-node processes; leave it out"
        )
    return {
        "nodes": options.nodes,
        "rollout_nodes": options.rollout_nodes,
        "ranks_per_node": options.ranks_per_node,
        "gpus": not options.no_gpus,
        "save_before": options.save_before,
        "how": options.how,
        "allow_change": tuple(options.allow_change),
    }


def note(config: Config, job: Job) -> None:
    """Warns on stderr of more GPUs than ranks, and of GPUs that are too small."""
    from megatron_gvpo.planner import prediction

    if job.gpus and (started := config.started_gpus()):
        more = sum(started.values())
        print(
            f"note: the job asks for {job.ranks_per_node + more} GPUs a node: {job.ranks_per_node} for "
            f"ranks and {more}, which are used on the first node alone, for {', '.join(started)}. Where "
            "nodes have fewer, give a smaller --ranks-per-node, or urls",
            file=sys.stderr,
        )
    ranks = job.nodes * job.ranks_per_node
    if job.gpus and (excess := prediction.excess(config, ranks, prediction.COMMON_GIB)):
        print(f"warning: on a GPU of 80 GB {excess}", file=sys.stderr)


def note_no_checkpoints(config: Config) -> None:
    if not config.checkpoint.every:
        print("note: checkpoint.every=0, so a failed node would cost all steps so far", file=sys.stderr)


def add_pod_arguments(
    parser: argparse.ArgumentParser, *, mount: str, secret: str, names: tuple[str, str]
) -> None:
    """Adds the options of jobs whose nodes run in images; the texts say what a volume and a secret are."""
    parser.add_argument("--name", help="the job's name (default: that of output_dir)")
    repeatable: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--mount", metavar=names[0], help=mount, **repeatable)
    parser.add_argument(
        "--env",
        metavar="NAME=VALUE",
        help="a variable of all nodes, not a secret; repeatable",
        **repeatable,
    )
    parser.add_argument("--secret", metavar=names[1], help=secret, **repeatable)


def pod_job(options: argparse.Namespace, config: Config, **more: Any) -> PodJob:
    """The job that the options describe. Raises ConfigError."""
    from megatron_gvpo.cluster.pods import PodJob, parse_pairs

    mounts: dict[str, str] = {}
    for text in options.mount:
        volume, directory = next(iter(parse_pairs("--mount", [text], "VOLUME=DIRECTORY").items()))
        if mounts.setdefault(os.path.normpath(directory), volume) != volume:
            raise ConfigError(f"--mount {text}: {directory} has another volume already")
    return PodJob(
        **job_fields(options),
        name=options.name if options.name is not None else Path(os.path.realpath(config.output_dir)).name,
        volumes=mounts,
        mounts=tuple(mounts),
        env=parse_pairs("--env", options.env, "NAME=VALUE"),
        secrets=tuple(options.secret),
        **more,
    )
