"""A real Slurm on this machine for tests: one slurmctld and three slurmd, which end with the session.

Debian's packages are installed where they are missing (this takes root and seconds). Where Slurm cannot be
installed, the tests that need it fail and say why. The "nodes" share this machine's network and files.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from helpers.machine.debian import install
from helpers.suite.real_parts import used
from megatron_gvpo.core.launch import free_ports

NODES = ("gvpo-node1", "gvpo-node2", "gvpo-node3")
PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
PACKAGES = ("slurm-wlm", "slurm-wlm-basic-plugins", "munge")
PATIENCE = 600.0  # the longest wait, in seconds, for a job's next state
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "BOOT_FAIL", "OUT_OF_MEMORY")
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool.%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,requeue_delay=1,batch_sched_delay=0,bf_interval=1
MinJobAge=3600
KillWait=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The commands of a running Slurm."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.environment = {**os.environ, "SLURM_CONF": str(base / "slurm.conf"), "GLOO_SOCKET_IFNAME": "lo"}

    def __call__(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self("squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T").split("\n")[0]

    def wait(self, job: str, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition` holds; fail with the job's output if it does not in time."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, (
                f"{what}: not in {PATIENCE:.0f} s; the job is {self.state(job)}.\n{self.logs(job)}"
            )
            time.sleep(0.2)

    def wait_for_start(self, job: str, number: int) -> None:
        """Wait until the job has made start `number`, without Slurm's two minutes before each start."""

        since: dict[str, float] = {}  # the time at which the job was first seen in a state

        def waited(kind: str, now_so: bool) -> float:
            if not now_so:
                since.pop(kind, None)
                return 0.0
            return time.monotonic() - since.setdefault(kind, time.monotonic())

        def started() -> bool:
            state = self.state(job)
            # The job looks ended for a moment before each start.
            assert waited("over", state in OVER) < 120, (
                f"the job is {state} without start {number}:\n{self.logs(job)}"
            )
            # A node refuses a job that it ended in the same second, so wait a moment.
            if waited("pending", state == "PENDING") > 3:
                with suppress(AssertionError):  # the job's last start may not have ended yet
                    self("scontrol", "update", f"jobid={job}", "starttime=now")
            return f"start {number} on" in self.logs(job)

        self.wait(job, started, f"start {number}")

    def end(self, job: str) -> str:
        """Wait until the job is over; returns its state."""
        self.wait(job, lambda: self.state(job) in OVER, "the end of the job")
        return self.state(job)

    def output(self, job: str) -> Path:
        details = self("scontrol", "show", "job", job)
        return Path(next(line.split("=", 1)[1] for line in details.split() if line.startswith("StdOut=")))

    def ended(self, job: str) -> float:
        """The end of the job, in seconds since the epoch."""
        details = dict(
            item.split("=", 1) for item in self("scontrol", "show", "job", job).split() if "=" in item
        )
        return datetime.fromisoformat(details["EndTime"]).timestamp()

    def logs(self, job: str) -> str:
        """The job's output and the ends of all its logs."""
        file = self.output(job)
        files = [file, *sorted(file.parent.glob(f"{job}.*/*.log"))]
        return "\n".join(f"== {log}\n{log.read_text()[-3000:]}" for log in files if log.exists())


@contextmanager
def running(base: Path) -> Iterator[Slurm]:
    install(PROGRAMS, PACKAGES)
    _resolvable()
    _start_munge()
    host = socket.gethostname().split(".")[0]
    ports = free_ports(1 + len(NODES), "127.0.0.1")
    for directory in ("state", *(f"spool.{node}" for node in NODES)):
        (base / directory).mkdir()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    (base / "slurm.conf").write_text(CONFIG.format(base=base, host=host, port=ports[0], nodes=nodes))
    slurm = Slurm(base)
    try:
        slurm("slurmctld", "-f", str(base / "slurm.conf"))
        for node in NODES:
            slurm("slurmd", "-f", str(base / "slurm.conf"), "-N", node)
        deadline = time.monotonic() + 300
        while "idle" not in (states := _states(slurm)) or len(states) != 1:
            logs = "\n".join(log.read_text()[-2000:] for log in base.glob("*.log"))
            assert time.monotonic() < deadline, f"Slurm's nodes are {states} after five minutes:\n{logs}"
            time.sleep(0.2)
        used("Slurm")
        yield slurm
    finally:
        with suppress(AssertionError, FileNotFoundError):
            slurm("scancel", "--user=root", "--signal=KILL")
            slurm("scancel", "--user=root")
            deadline = time.monotonic() + 30
            while slurm("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.2)
        for pid in base.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(pid.read_text()), 15)


def _states(slurm: Slurm) -> set[str]:
    try:
        return set(slurm("sinfo", "--noheader", "--Node", "--format=%T").split())
    except AssertionError:  # Slurm is still starting
        return set()


def _resolvable() -> None:
    """Give the nodes and this machine an address by name, as every cluster does."""
    for name in (*NODES, socket.gethostname()):
        try:
            socket.gethostbyname(name)
        except OSError:
            with open("/etc/hosts", "a", encoding="ascii") as hosts:
                hosts.write(f"127.0.0.1 {name}\n")


def _start_munge() -> None:
    key = Path("/etc/munge/munge.key")
    if not key.exists():
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        shutil.chown(key, "munge", "munge")
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    if subprocess.run(["munge", "-n"], capture_output=True).returncode:
        started = subprocess.run(
            ["runuser", "-u", "munge", "--", "/usr/sbin/munged"], capture_output=True, text=True
        )
        assert started.returncode == 0, f"munged: {started.stderr}"
