"""`megatron-gvpo sky`: the task of a config for SkyPilot, for `sky jobs launch`.

All nodes of a SkyPilot task are alike: the first nodes train, and the servers run on the others.
SkyPilot gives every node its number and all addresses, and starts a managed job again when a node is lost or
preempted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_gvpo.cluster.pods import (
    AGAIN,
    KEY,
    MEETING_PORT,
    NEVER,
    ROLLOUT_PORT,
    VARIABLE,
    PodJob,
    Role,
    check_pods,
    node_script,
)
from megatron_gvpo.cluster.script import LineDumper, command_line, write_job
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import Config

WRITTEN = "# A task for SkyPilot, written by: megatron-gvpo"  # every file begins with this
_NAME = re.compile(r"[a-zA-Z0-9]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?")  # SkyPilot's rule for names
_GPU = re.compile(r"[A-Za-z][-A-Za-z0-9]*")


def check_sky(
    config: Config, arguments: Sequence[str], job: PodJob, gpu: str | None, shown: bool = False
) -> None:
    """Raises ConfigError for a job that could not run, as `check_pods` does, or that SkyPilot would refuse.

    `gpu`: the kind of the nodes' GPUs, as SkyPilot calls it.
    """
    if not _NAME.fullmatch(job.name):
        raise ConfigError(
            f"--name {job.name}: SkyPilot's names have letters, digits, -, _ and . only, and begin and end "
            "with a letter or a digit; without --name it is that of output_dir"
        )
    if not job.container:
        raise ConfigError("--container is missing: the image of the nodes, as registry/trainer:tag")
    if job.gpus and not gpu:
        raise ConfigError("--gpu is missing: the kind of the nodes' GPUs, such as H100; or give --no-gpus")
    if gpu and (not job.gpus or not _GPU.fullmatch(gpu)):
        raise ConfigError(f"--gpu {gpu}: expected a kind of GPU, such as H100, and no --no-gpus")
    for name in job.secrets:
        if not VARIABLE.fullmatch(name):
            raise ConfigError(f"--secret {name}: expected a variable, whose value you give to SkyPilot")
    check_pods(config, arguments, job, shown)


def render(config: Config, arguments: Sequence[str], job: PodJob, gpu: str | None) -> str:
    """Returns the task as YAML. `arguments`: config files and overrides, as `train` takes them."""
    resources: dict[str, Any] = {
        "image_id": f"docker:{job.container}",
        # The script's exit code tells SkyPilot whether another start is useful.
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [AGAIN]},
    }
    if gpu:
        resources["accelerators"] = f"{gpu}:{job.ranks_per_node + sum(config.started_gpus().values())}"
    secrets = [*job.secrets, *([KEY] if config.rollout.uses_servers and KEY not in job.secrets else [])]
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes + job.rollout_nodes,
        "resources": resources,
        "volumes": dict(job.volumes),
        "envs": {"MEETING_PORT": str(MEETING_PORT), "ROLLOUT_PORT": str(ROLLOUT_PORT)} | job.env,
        "secrets": {name: None for name in secrets},  # `sky jobs launch --secret NAME` gives the values
        "config": {"hooks": [_hook(config, job)]},
        "run": _run(config, arguments, job),
    }
    task = {key: value for key, value in task.items() if value or key == "num_nodes"}
    text: str = yaml.dump(task, Dumper=LineDumper, sort_keys=False, width=1000)
    return f"{WRITTEN.rpartition('megatron-gvpo')[0]}{command_line()}\n{text}"


def _hook(config: Config, job: PodJob) -> dict[str, Any]:
    """The hook that SkyPilot runs before it takes the nodes away: it makes the run save and waits for it."""
    folder = shlex.quote(f"{config.output_dir}/sky")
    lock = shlex.quote(f"{config.output_dir}/run.lock")
    save = f"mkdir -p {folder} && touch {folder}/stop\nwhile [ -e {lock} ]; do sleep 2; done\n"
    run = _directory(job) + save  # SkyPilot runs a hook in a directory of its own
    return {"run": run, "events": ["stop", "preemption", "down"], "timeout": job.save_before}


def _run(config: Config, arguments: Sequence[str], job: PodJob) -> str:
    """The script of all nodes: a node's number decides which part it runs."""

    def part(role: Role) -> str:
        return node_script(
            config,
            arguments,
            job,
            role,
            "sky",
            hosts=f'"${{addresses[@]:0:{job.nodes}}}"',
            rollout_hosts=f'"${{addresses[@]:{job.nodes if job.rollout_nodes else 0}}}"',
        )

    text = _PREAMBLE.format(
        folder=shlex.quote(f"{config.output_dir}/sky"), directory=_directory(job), never=NEVER
    )
    if not job.rollout_nodes:
        return text + part("trainer")
    return (
        f"{text}if [ $NODE -lt {job.nodes} ]; then\n{part('trainer')}fi\n"
        f"NODE=$((NODE - {job.nodes}))\n{part('servers')}"
    )


# A managed job keeps its id when it starts again, and gets other nodes or another number on them. All nodes
# of a start agree on its number by the links, of which only one can be made under a name.
_PREAMBLE = """\
{directory}addresses=($SKYPILOT_NODE_IPS)
export NODE=$SKYPILOT_NODE_RANK ADDRESS=${{addresses[SKYPILOT_NODE_RANK]}} JOB=$SKYPILOT_TASK_ID
this=$(echo "$SKYPILOT_NODE_IPS" "$SKYPILOT_INTERNAL_JOB_ID" | cksum | tr ' ' -)
export START=0
mkdir -p {folder} && [ -w {folder} ] || exit {never}
is_number() {{ ln -s "$this" "$1" 2>/dev/null || [ "$(readlink "$1")" = "$this" ]; }}
until is_number {folder}/"$JOB.$START.is"; do START=$((START + 1)); done
"""


def _directory(job: PodJob) -> str:
    """The line that changes to the working directory, if the nodes have it."""
    here = Path.cwd()
    return f"cd {shlex.quote(str(here))}\n" if any(here.is_relative_to(d) for d in job.volumes) else ""


def write(config: Config, text: str) -> Path:
    """Writes the task to output_dir/sky/task.yaml. Raises ConfigError if it cannot be written."""
    return write_job(config, "sky", "task.yaml", "a file that `sky` wrote", WRITTEN, text)
