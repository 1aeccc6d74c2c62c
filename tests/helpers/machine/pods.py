"""A stand-in for JobSet: the commands of a JobSet's pods run as processes of this machine.

Pods have the environment that Kubernetes and JobSet give them, and names of pods are replaced by loopback's
address. Restarts are those of JobSet: all pods end, then all start with the next number, unless a pod's exit
code tells JobSet not to restart. Volumes are this machine's own directories.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from megatron_gvpo.core.launch import free_ports

PATIENCE = 600.0  # the longest wait, in seconds, for the pods' next state
UID = "1b7c"  # the JobSet's uid


class Pod:
    """One container that runs as a process; `log` has what `kubectl logs` shows."""

    def __init__(self, command: list[str], environment: dict[str, str], directory: str, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._root = psutil.Process(self.process.pid)

    def kill(self) -> None:
        """Kills all processes of the pod at once, as the loss of a node does."""
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            processes = []
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue

    def stop(self) -> None:
        """Sends the signal with which the kubelet asks a container to end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


class LocalJobSet:
    """The pods of a JobSet's file. `follow` is the controller; `pods` are those of the current start."""

    def __init__(self, file: Path, directory: Path, variables: dict[str, str] | None = None) -> None:
        self.jobset = yaml.safe_load(file.read_text())
        self.directory = directory
        self.variables = variables or {}  # the variables of Secrets and of the image
        self.start = 0
        self.pods: dict[tuple[str, int], Pod] = {}

    def jobs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for job in self.jobset["spec"]["replicatedJobs"]:
            yield job["name"], job["template"]["spec"]

    def begin(self) -> None:
        """Starts all pods, on free ports."""
        ports = dict(zip(("MEETING_PORT", "ROLLOUT_PORT"), free_ports(2, "127.0.0.1"), strict=True))
        for role, job in self.jobs():
            for index in range(job["completions"]):
                self.pods[role, index] = self._pod(role, index, job["template"]["spec"], ports)

    def _pod(self, role: str, index: int, spec: dict[str, Any], ports: dict[str, int]) -> Pod:
        name = self.jobset["metadata"]["name"]
        (container,) = spec["containers"]
        fields = {
            "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": UID,
            "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": str(self.start),
            "status.podIP": "127.0.0.1",
        }
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": os.environ["HOME"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "JOB_COMPLETION_INDEX": str(index),
            **self.variables,
        }
        for variable in container["env"]:
            value = variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            environment[variable["name"]] = str(ports.get(variable["name"], value))
        address = re.compile(rf"\b{name}-[a-z]+-0-\d+\.{name}\b")
        command = [address.sub("127.0.0.1", word) for word in container["command"]]
        log = self.directory / f"{role}_{index}.{self.start}.log"
        return Pod(command, environment, container.get("workingDir", str(self.directory)), log)

    def follow(self, until: Callable[[], bool] = lambda: False) -> str:
        """Plays JobSet's controller; returns "Completed" or "Failed", or "" once `until()` is true."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if until():
                return ""
            codes = {
                index: pod.process.poll() for (role, index), pod in self.pods.items() if role == "trainer"
            }
            if any(codes.values()):
                self.end()
                useless = self._useless()
                if useless & set(codes.values()):
                    return "Failed"
                if self.start == self.jobset["spec"]["failurePolicy"]["maxRestarts"]:
                    return "Failed"
                self.start += 1
                self.begin()
            elif all(code == 0 for code in codes.values()):
                self.end()
                return "Completed"
            time.sleep(0.2)
        raise AssertionError(f"nothing has come about in {PATIENCE:g} s:\n{self.logs()}")

    def _useless(self) -> set[int]:
        """The exit codes of the trainer's pods with which JobSet does not start them again."""
        rules = self.jobset["spec"]["failurePolicy"]["rules"]
        assert [rule["onJobFailureReasons"] for rule in rules] == [["PodFailurePolicy"]]
        assert [rule["action"] for rule in rules] == ["FailJobSet"]
        (policy,) = dict(self.jobs())["trainer"]["podFailurePolicy"]["rules"]
        return set(policy["onExitCodes"]["values"])

    def end(self) -> None:
        """Ends all pods: sends the signal, waits while they save, and then kills them."""
        for pod in self.pods.values():
            pod.stop()
        for (role, _), pod in self.pods.items():
            spec = dict(self.jobs())[role]["template"]["spec"]
            with suppress(subprocess.TimeoutExpired):
                pod.process.wait(spec["terminationGracePeriodSeconds"])
            pod.kill()

    def logs(self) -> str:
        files = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-6000:]}" for file in files)


@contextmanager
def running(file: Path, directory: Path, variables: dict[str, str] | None = None) -> Iterator[LocalJobSet]:
    """The started pods of the JobSet in `file`; `directory` gets their logs."""
    directory.mkdir(exist_ok=True)
    jobset = LocalJobSet(file, directory, variables)
    jobset.begin()
    try:
        yield jobset
    finally:
        for pod in jobset.pods.values():
            pod.kill()
