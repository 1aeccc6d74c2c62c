"""A job of nodes that each run one script, as on Kubernetes and SkyPilot: the job, its checks, the script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_gvpo.cluster.job import Job, check, unseen
from megatron_gvpo.cluster.script import render_script
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.secrets import is_secret_name
from megatron_gvpo.settings.config import Config

# Exit codes of a node's script: start the job again, as after a lost node; end it, another start is useless.
AGAIN, NEVER = 75, 65
MEETING_PORT, ROLLOUT_PORT = 29500, 30000
Role = Literal["trainer", "servers"]
KEY = "ROLLOUT_KEY"  # the variable with the servers' key
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = ("NODE", "JOB", "START", "ADDRESS", "HOW", "MEGATRON_GVPO_LOGS", "MEETING_PORT", "ROLLOUT_PORT")


@dataclass(frozen=True)
class PodJob(Job):
    """A job of Kubernetes or SkyPilot. The nodes run in images, and share only files on volumes."""

    name: str = ""
    volumes: dict[str, str] = field(default_factory=dict)  # directory: the volume that is mounted there
    env: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()  # Kubernetes: Secret objects; SkyPilot: variables


def parse_pairs(option: str, texts: Sequence[str], form: str) -> dict[str, str]:
    """The pairs of a repeatable option of the form LEFT=RIGHT. Raises ConfigError for another form."""
    pairs: dict[str, str] = {}
    for text in texts:
        left, sign, right = text.partition("=")
        if not left or not sign or not right:
            raise ConfigError(f"{option} {text}: expected {form}")
        if left in pairs:
            raise ConfigError(f"{option} {text}: {left} is given twice")
        pairs[left] = right
    return pairs


def check_pods(config: Config, arguments: Sequence[str], job: PodJob, shown: bool = False) -> None:
    """Raises ConfigError for a job that could not run, as `check` does, or whose nodes would miss a file."""
    for name, image in (("container", job.container), ("rollout-container", job.rollout_container)):
        if image is not None and (not image or not image.isprintable() or " " in image):
            raise ConfigError(f"--{name} {image!r}: expected an image's name, as registry/image:tag")
    for directory, volume in job.volumes.items():
        if not directory.startswith("/") or ":" in directory or not directory.isprintable():
            raise ConfigError(
                f"--mount {volume}={directory}: expected VOLUME=DIRECTORY with an absolute path and no colon"
            )
    _check_environment(job.env)
    check(config, job, shown)
    if outside := unseen(config, arguments, job, working_directory=False):
        raise ConfigError(
            f"{outside[0]}: is not on a volume that the job's nodes share; give --mount VOLUME=DIRECTORY "
            "with a directory above it"
        )


def _check_environment(env: dict[str, str]) -> None:
    for name, value in env.items():
        if not VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {name}: a variable's name has letters, digits and _ only")
        if name in _RESERVED:
            raise ConfigError(f"--env {name}: the job sets this variable itself")
        if is_secret_name(name):
            raise ConfigError(
                f"--env {name}: its name says that it is a secret, which would stand in the file; give it by "
                "--secret"
            )
        if not value.isprintable():
            raise ConfigError(f"--env {name}: the value has a line break or another control character")


def node_script(
    config: Config,
    arguments: Sequence[str],
    job: PodJob,
    role: Role,
    cluster: Literal["k8s", "sky"],
    hosts: str,
    rollout_hosts: str,
) -> str:
    """The bash script of a node of the trainer, or of the rollout servers.

    `hosts`, `rollout_hosts`: the nodes' addresses, as words of bash. The environment has NODE, JOB, START and
    ADDRESS: the node's number among those of its role, the job, the number of its start, the node's address.
    """
    return render_script(
        "node.sh.j2",
        config,
        arguments,
        job,
        role=role,
        cluster=cluster,
        hosts=hosts,
        rollout_hosts=rollout_hosts,
        again=AGAIN,
        never=NEVER,
    )
