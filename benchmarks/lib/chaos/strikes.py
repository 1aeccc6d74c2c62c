"""Commits the faults of a chaos schedule on a run's real processes, files and connections."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from helpers.servers.faults import signal_for_a_while
from helpers.servers.proxy import Mode, Proxy

from lib.chaos.clock import Clock
from lib.chaos.schedules import Fault
from lib.chaos.starter import kill_session
from megatron_gvpo.core.launch import free_ports

LINKS: dict[str, Mode] = {"slow link": "slow", "cut link": "cut", "close link": "refuse"}
JUDGE = Path(__file__).with_name("judge.py")


class NotYet(Exception):  # noqa: N818 - not an error
    """The fault's victim does not exist at the moment; the fault strikes as soon as it does."""


class Judge:
    """The judge's process (judge.py), which may be killed and started again."""

    def __init__(self, ledger: Path, seconds: float) -> None:
        [self.port] = free_ports(1, "127.0.0.1")
        self.ledger = ledger
        self._command = [sys.executable, str(JUDGE), str(self.port), str(ledger), str(seconds)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Server:
    """A rollout server: its process group's leader may change, its address does not."""

    pid: Callable[[], int | None]
    link: Proxy


@dataclass
class Scene:
    """The parts of a run that faults hit. `pid` is the launcher's, whose children are the ranks."""

    out: Path
    judge: Judge
    clock: Clock
    rng: random.Random
    servers: list[Server] = field(default_factory=list)
    pid: int | None = None
    ended: Callable[[], bool] = lambda: True  # true once the launcher has ended
    _timers: list[threading.Timer] = field(default_factory=list)

    def strike(self, fault: Fault) -> None:
        """Commit the fault. Raises NotYet if its victim does not exist."""
        try:
            self._strikes[fault.kind](self, fault)
        except psutil.NoSuchProcess:
            raise NotYet from None

    def rest(self) -> None:
        """Wait until every fault that lasts is over."""
        for timer in self._timers:
            timer.join()

    def lose_everything(self) -> None:
        """Kill the launcher and its ranks, as a lost node or Slurm's end of a job does."""
        if self.pid is not None:
            kill_session(self.pid)

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, action)
        timer.start()
        self._timers.append(timer)

    def _signal(self, pid: int, fault: Fault, group: bool = False) -> None:
        """Send SIGKILL, or SIGSTOP for the fault's seconds."""
        if timer := signal_for_a_while(pid, fault.seconds, group=group):
            self._timers.append(timer)

    def _rank(self, number: int) -> psutil.Process:
        if self.pid is None or self.ended():
            raise NotYet
        ranks = sorted(psutil.Process(self.pid).children(), key=lambda process: process.pid)
        if len(ranks) <= number:
            raise NotYet
        return ranks[number]

    def _hit_rank(self, fault: Fault) -> None:
        self._signal(self._rank(fault.victim).pid, fault)

    def _hit_reward_worker(self, fault: Fault) -> None:
        """Send the signal to the worker: the child of the guard, which is the trainer's child."""
        for guard in self._rank(fault.victim).children():
            if "megatron_gvpo.workers.reaper" in guard.cmdline() and (workers := guard.children()):
                return self._signal(workers[0].pid, fault, group=True)
        raise NotYet

    def _lose_node(self, fault: Fault) -> None:
        self._rank(0)  # raises NotYet before the run has begun
        self.lose_everything()

    def _tell(self, fault: Fault) -> None:
        self._rank(1)
        assert self.pid is not None
        os.kill(self.pid, signal.SIGTERM if fault.victim else signal.SIGUSR1)

    def _kill_judge(self, fault: Fault) -> None:
        self.judge.kill()
        self._after(fault.seconds, self.judge.start)

    def _stop_judge(self, fault: Fault) -> None:
        self._signal(self.judge.pid, fault)

    def _fill_disk(self, fault: Fault) -> None:
        """Take all space of the run's file system."""
        filler = self.out.parent / "filler"
        with filler.open("ab", buffering=0) as file:
            for block in (1 << 20, 1 << 12):
                try:
                    while file.write(bytes(block)) == block:
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        self._after(fault.seconds, filler.unlink)

    def _jump_clock(self, fault: Fault) -> None:
        self.clock.jump(fault.size)

    def _corrupt_checkpoint(self, fault: Fault) -> None:
        """Kill the launcher and the ranks, and flip a bit of the newest checkpoint; older ones stay good."""
        complete = [path.parent for path in (self.out / "checkpoints").glob("step_????????/state.json")]
        if len(complete) < 2:
            raise NotYet
        self._rank(0)
        self.lose_everything()
        while not self.ended():
            pass
        complete = [path.parent for path in (self.out / "checkpoints").glob("step_????????/state.json")]
        files = sorted(path for path in max(complete).rglob("*") if path.is_file() and path.stat().st_size)
        file = self.rng.choice(files)
        data = bytearray(file.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        file.write_bytes(data)

    def _hit_server(self, fault: Fault) -> None:
        if (pid := self.servers[fault.victim].pid()) is None:
            raise NotYet
        self._signal(pid, fault, group=True)

    def _hit_link(self, fault: Fault) -> None:
        link = self.servers[fault.victim].link
        link.set(LINKS[fault.kind])
        self._after(fault.seconds, lambda: link.set("forward"))

    _strikes = {  # noqa: RUF012 - never changed
        "kill rank": _hit_rank,
        "stop rank": _hit_rank,
        "lose node": _lose_node,
        "kill reward worker": _hit_reward_worker,
        "stop reward worker": _hit_reward_worker,
        "kill judge": _kill_judge,
        "stop judge": _stop_judge,
        "fill disk": _fill_disk,
        "jump clock": _jump_clock,
        "corrupt checkpoint": _corrupt_checkpoint,
        "tell to stop": _tell,
        "kill server": _hit_server,
        "stop server": _hit_server,
        "slow link": _hit_link,
        "cut link": _hit_link,
        "close link": _hit_link,
    }
