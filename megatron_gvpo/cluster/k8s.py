"""`megatron-gvpo k8s`: the JobSet of a config for Kubernetes (jobset.x-k8s.io).

The trainer's nodes are the pods of one indexed Job, and the servers' nodes are the pods of another. JobSet
gives every pod a name, and starts all pods again when one of the trainer's has failed. Kubeflow's TrainJob
also makes a JobSet, but needs a runtime that an administrator installs, and it has no second kind of pods.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_gvpo.cluster.pods import (
    KEY,
    MEETING_PORT,
    NEVER,
    ROLLOUT_PORT,
    PodJob,
    Role,
    check_pods,
    node_script,
)
from megatron_gvpo.cluster.script import LineDumper, command_line, write_job
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import Config

WRITTEN = "# A JobSet for Kubernetes, written by: megatron-gvpo"  # every file begins with this
# The script ends the job after five starts without a newer checkpoint, so JobSet's own limit is out of reach.
MOST_RESTARTS = 1000
LONGEST_NAME = 63  # characters of a label in DNS
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def check_k8s(config: Config, arguments: Sequence[str], job: PodJob, shown: bool = False) -> None:
    """Raises ConfigError for a job that could not run, as `check_pods` does, or that Kubernetes refuses."""
    _check_name(job)
    if not job.container:
        raise ConfigError("--container is missing: the image of the pods, as registry/trainer:tag")
    for option, names in (("--mount", job.volumes.values()), ("--secret", job.secrets)):
        for name in names:
            if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
                raise ConfigError(
                    f"{option} {name}: Kubernetes' names have small letters, digits, - and . only, and begin "
                    "and end with a letter or a digit"
                )
    check_pods(config, arguments, job, shown)
    if job.rollout_container is not None and not job.rollout_nodes:
        raise ConfigError(
            f"--rollout-container {job.rollout_container}: without --rollout-nodes the servers share the "
            "trainer's container, because two containers cannot share a GPU; leave it out"
        )
    if config.rollout.uses_servers and not job.secrets:
        raise ConfigError(
            f"--secret is missing: the Secret that has {KEY}, the key of the rollout servers; make one by "
            f"`kubectl create secret generic NAME --from-literal={KEY}=$(openssl rand -hex 16)`"
        )


def _check_name(job: PodJob) -> None:
    """Raises ConfigError for a name that is not a label of DNS, or that makes a pod's name too long."""
    longest = max(len(f"-trainer-0-{job.nodes - 1}"), len(f"-servers-0-{max(0, job.rollout_nodes - 1)}"))
    room = LONGEST_NAME - longest - len("-abcde")  # Kubernetes adds five letters
    if not _LABEL.fullmatch(job.name) or len(job.name) > room:
        possible = re.sub("[^a-z0-9]+", "-", job.name.lower()).lstrip("-0123456789")[:room].strip("-")
        proposed = f", such as --name {possible}" if possible else ""
        raise ConfigError(
            f"--name {job.name}: Kubernetes takes at most {room} small letters, digits and - here, beginning "
            f"with a letter and not ending with -{proposed}; without --name it is that of output_dir"
        )


def render(config: Config, arguments: Sequence[str], job: PodJob) -> str:
    """Returns the JobSet as YAML. `arguments`: config files and overrides, as `train` takes them."""
    roles: tuple[Role, ...] = ("trainer", "servers") if job.rollout_nodes else ("trainer",)
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            # Pods know each other by NAME-ROLE-0-INDEX.NAME from the moment they exist.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
            "failurePolicy": {
                "maxRestarts": MOST_RESTARTS,
                "restartStrategy": "BlockingRecreate",  # no pod of two starts at one time
                "rules": [
                    {
                        "name": "useless",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "targetReplicatedJobs": ["trainer"],
                    }
                ],
            },
            "replicatedJobs": [_replicated_job(config, arguments, job, role) for role in roles],
        },
    }
    text: str = yaml.dump(jobset, Dumper=LineDumper, sort_keys=False, width=1000)
    return f"{WRITTEN.rpartition('megatron-gvpo')[0]}{command_line()}\n{text}"


def _replicated_job(config: Config, arguments: Sequence[str], job: PodJob, role: Role) -> dict[str, Any]:
    """The Job of the pods of one role."""
    is_trainer = role == "trainer"
    nodes = job.nodes if is_trainer else job.rollout_nodes
    spec: dict[str, Any] = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    if is_trainer:  # all pods start again if one fails, unless its exit code says that this is useless
        ends = {"containerName": role, "operator": "In", "values": [NEVER]}
        spec |= {
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": ends}]},
        }
    else:  # a lost server restarts under its name, and the trainer gives it the weights again
        spec |= {"backoffLimit": MOST_RESTARTS}
    spec["template"] = {"spec": _pod(config, arguments, job, role)}
    return {"name": role, "replicas": 1, "template": {"spec": spec}}


def _pod(config: Config, arguments: Sequence[str], job: PodJob, role: Role) -> dict[str, Any]:
    claims = {f"volume-{i}": claim for i, claim in enumerate(job.volumes.values())}
    return {
        "restartPolicy": "Never" if role == "trainer" else "OnFailure",
        "terminationGracePeriodSeconds": job.save_before,
        # Programs that a model wrote may run here; they get no access to the cluster's API.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [_container(config, arguments, job, role)],
        "volumes": [
            *(
                {"name": name, "persistentVolumeClaim": {"claimName": claim}}
                for name, claim in claims.items()
            ),
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _container(config: Config, arguments: Sequence[str], job: PodJob, role: Role) -> dict[str, Any]:
    is_trainer = role == "trainer"
    hosts, rollout_hosts = (
        " ".join(f"{job.name}-{kind}-0-{index}.{job.name}" for index in range(count))
        for kind, count in (("trainer", job.nodes), ("servers", job.rollout_nodes))
    )
    script = node_script(config, arguments, job, role, "k8s", hosts, rollout_hosts or hosts)
    mounts = [{"name": f"volume-{i}", "mountPath": directory} for i, directory in enumerate(job.volumes)]
    container: dict[str, Any] = {
        "name": role,
        "image": job.container if is_trainer else job.rollout_container or job.container,
        "command": ["bash", "-c", script],
        "env": _environment(job),
        "volumeMounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if job.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.secrets]
    here = Path.cwd()
    if any(here.is_relative_to(directory) for directory in job.volumes):
        container["workingDir"] = str(here)
    if job.gpus:
        gpus = job.ranks_per_node + (sum(config.started_gpus().values()) if is_trainer else 0)
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    return container


def _environment(job: PodJob) -> list[dict[str, Any]]:
    """The variables of --env, and those that describe the pod to the script."""
    plain = {"MEETING_PORT": str(MEETING_PORT), "ROLLOUT_PORT": str(ROLLOUT_PORT)} | job.env
    fields = {
        "JOB": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']",
        "START": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
        "ADDRESS": "status.podIP",
    }
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]


def write(config: Config, text: str) -> Path:
    """Writes the JobSet to output_dir/k8s/jobset.yaml. Raises ConfigError if it cannot be written."""
    return write_job(config, "k8s", "jobset.yaml", "a file that `k8s` wrote", WRITTEN, text)
