"""A job on any kind of cluster: its resources, and checks that refuse an impossible job before it queues."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_gvpo.checks.files import inputs
from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.existing_run import Earlier
from megatron_gvpo.settings.config import Config, split_words

MOST_RANKS = 65536
SHORTEST_NOTICE = 120  # seconds to save; Slurm may send its signal up to a minute early
# `train`'s options for an earlier run, as `preflight` calls them.
EARLIER: dict[str, Earlier] = {
    "": "refuse",
    "--resume": "resume",
    "--resume=auto": "auto",
    "--overwrite": "overwrite",
}


@dataclass(frozen=True)
class Job:
    """Resources and options of a job, which `slurm`, `k8s` and `sky` write for their clusters."""

    nodes: int  # the trainer's nodes
    rollout_nodes: int = 0  # additional nodes for the rollout servers; 0: they run on the trainer's nodes
    ranks_per_node: int = 8
    gpus: bool = True  # one GPU for each rank; False: CPUs over gloo
    save_before: int = 600  # seconds from the signal to stop to the end; must exceed a step and a checkpoint
    container: str | None = None  # image for the ranks; None: the nodes' own files
    rollout_container: str | None = None  # image for the servers; None: the same as `container`
    mounts: tuple[str, ...] = ()  # directories that the containers see, besides the working directory
    # The option that `train` gets when it is started for the first time.
    how: Literal["", "--resume", "--resume=auto", "--overwrite"] = ""
    allow_change: tuple[str, ...] = ()  # the keys that may differ from those of a run that is resumed


def check(config: Config, job: Job, shown: bool = False) -> None:
    """Raises ConfigError for a job that could not run, so that it does not wait in a queue first.

    `shown`: the job is only to be shown, so an earlier run in its output directory is not an obstacle.
    """
    if job.nodes < 1 or job.rollout_nodes < 0 or job.ranks_per_node < 1:
        raise ConfigError("--nodes and --ranks-per-node must be at least 1, --rollout-nodes at least 0")
    if (ranks := job.nodes * job.ranks_per_node) > MOST_RANKS or job.rollout_nodes > MOST_RANKS:
        raise ConfigError(
            f"--nodes, --rollout-nodes: {ranks} ranks, {job.rollout_nodes} nodes of servers: "
            f"at most {MOST_RANKS}"
        )
    if job.save_before < SHORTEST_NOTICE:
        raise ConfigError(f"--save-before {job.save_before}: must be at least {SHORTEST_NOTICE} seconds")
    if job.rollout_container is not None and not config.rollout.uses_servers:
        raise ConfigError(
            f"--rollout-container {job.rollout_container}: rollout.engine={config.rollout.engine} has no "
            "servers; choose rollout.engine=sglang or vllm, or leave it out"
        )
    earlier = None if shown else EARLIER[job.how]
    ranks = job.nodes * job.ranks_per_node
    preflight(config, "slurm", ranks, earlier=earlier, allowed=job.allow_change)
    _check_servers(config, job)


def _check_servers(config: Config, job: Job) -> None:
    """Raises ConfigError for rollout servers that the nodes of the job could not run."""
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
    """The error for servers that need more GPUs than a node has, with a remedy."""
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


def unseen(config: Config, arguments: Sequence[str], job: Job, working_directory: bool = True) -> list[str]:
    """Lists, as `key=path`, the config's paths that are outside the directories mounted in the containers.

    `working_directory`: True if the containers see it, too.
    """
    if job.container is None:
        return []
    seen = [Path.cwd()] if working_directory else []
    seen += [Path(os.path.realpath(mount)) for mount in job.mounts]
    named = [("configuration", file) for file in split_words(arguments)[0]]
    named.append(("output_dir", config.output_dir))
    # One that does not exist may be the name of a hub data set.
    for key, path in inputs(config):
        if key == "model.path" or os.path.lexists(path):
            named.append((key, path))
    return [
        f"{name}={path}"
        for name, path in named
        if not any(Path(os.path.realpath(path)).is_relative_to(directory) for directory in seen)
    ]
