"""Runs chaos schedules, on parts that they share: the task, servers, processes that start commands."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from helpers import tiny_run

from lib.chaos.checks import PROMPTS, check, final_history
from lib.chaos.clock import Clock
from lib.chaos.job import Job, ledger_of
from lib.chaos.nodes import two_nodes
from lib.chaos.schedules import STEPS, Layout, Schedule
from lib.chaos.starter import SECOND_NODE, Command, Starter
from lib.chaos.strikes import JUDGE, Judge, Scene, Server

JUDGING = 0.1  # seconds of the judge for a group, so that faults have time to strike in a step
DISK = 300  # MB of the file system that holds a run's output, and that faults fill
LAYOUTS: dict[Layout, str] = {"dp2": "parallel.tp=1", "tp2": "parallel.tp=2"}


class Suite:
    """The parts that schedules share; a context manager. `servers`: the engine of schedules with servers."""

    def __init__(self, folder: Path, servers: str | None) -> None:
        self.folder, self._engine = folder, servers or "embedded"
        self.task, self._disk = folder / "task", folder / "disk"
        self._clock = Clock(folder)
        self._opened = ExitStack()
        self._starters: dict[bool, Starter] = {}
        self._references: dict[Layout, tuple[Path, list[list[str]]]] = {}
        self._nodes: tuple[list[Server], int] | None = None

    def __enter__(self) -> Self:
        tiny_run.make(self.task)
        self._disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(self._disk)]
        subprocess.run(mount, check=True)
        self._opened.callback(subprocess.run, ["umount", "--lazy", str(self._disk)], check=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def try_schedule(self, wanted: Schedule) -> dict[str, Any]:
        """Run a schedule and check the run; returns its result."""
        result: dict[str, Any] = {
            "seed": wanted.seed,
            "engine": self._engine,
            "layout": wanted.layout,
            "overrides": list(wanted.overrides),
            "faults": [str(fault) for fault in wanted.faults],
            "passed": True,
        }
        name = f"{wanted.engine}-{wanted.seed}"
        folder, ledger = self._disk / name, self.folder / f"{name}.jsonl"
        reference, order = self._reference(wanted)
        begin = time.monotonic()
        try:
            job = self._run(wanted, folder, ledger, faked=wanted.moves_clock)
            exact = reference if wanted.engine == "embedded" else None
            result["responses"] = check(job, ledger, exact, order)
            result["struck"] = job.struck
            result["starts"] = len(job.starts)
            result["exit_codes"] = [start.code for start in job.starts]
            result["passed"] = len(job.struck) == len(wanted.faults)
        except Exception:
            result |= {"passed": False, "error": traceback.format_exc()[-4000:]}
            self._keep(folder, ledger, name)
        shutil.rmtree(folder)
        return result | {"seconds": round(time.monotonic() - begin, 1), "load": round(os.getloadavg()[0], 1)}

    def _keep(self, folder: Path, ledger: Path, name: str) -> None:
        """Copy the files of a failed run to the system's directory for temporary files."""
        copy = Path(tempfile.gettempdir()) / f"chaos-{name}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        if ledger.exists():
            shutil.copy(ledger, copy)
        print(f"the files of {name} are in {copy}", file=sys.stderr)

    def _run(self, wanted: Schedule, folder: Path, ledger: Path, *, faked: bool) -> Job:
        """Run a schedule in the directory `folder`, to its end."""
        folder.mkdir()
        self._clock.set(0.0)
        judge = Judge(ledger, JUDGING)
        scene = Scene(folder / "out", judge, self._clock, random.Random(wanted.seed))
        own, environment = overrides(wanted, judge.port, scene.out), {}
        if wanted.engine == "served":
            scene.servers, second = self._servers()
            own += served_overrides(self._engine, scene.servers)
            environment = {SECOND_NODE: str(second)} if wanted.on_two_nodes else {}
        starter = self._starter(faked=faked)
        arguments, log = ["train", str(self.task / "run.yaml"), *own, "--nproc", "2"], folder / "log"

        def start(options: Sequence[str]) -> Command:
            return starter.start([*arguments, *options], log, environment)

        try:
            job = Job(start, scene.out, log, scene, wanted.faults, STEPS)
            job.run()
            return job
        finally:
            scene.rest()
            judge.kill()

    def _servers(self) -> tuple[list[Server], int]:
        if self._nodes is None:
            where = two_nodes(self._engine, self.task, self.folder / "servers")
            self._nodes = self._opened.enter_context(where)
        return self._nodes

    def _starter(self, *, faked: bool) -> Starter:
        """The process that starts commands. `faked`: the commands have the clock that can jump."""
        if faked not in self._starters:
            self._starters[faked] = Starter(self._clock.environment() if faked else {})
            self._opened.callback(self._starters[faked].close)
        return self._starters[faked]

    def _reference(self, wanted: Schedule) -> tuple[Path, list[list[str]]]:
        """The output of an undisturbed run of the embedded engine, and the prompts of its steps."""
        layout = wanted.layout
        if layout not in self._references:
            folder, ledger = self._disk / f"reference-{layout}", self.folder / f"reference-{layout}.jsonl"
            undisturbed = replace(wanted, engine="embedded", overrides=(), faults=())
            job = self._run(undisturbed, folder, ledger, faked=wanted.moves_clock)
            if len(job.starts) > 1:
                raise RuntimeError(f"the undisturbed run was disturbed:\n{job.tail()}")
            shutil.rmtree(job.out / "checkpoints")
            history = final_history(ledger_of(ledger))
            order = [[group["prompt"] for group in history[step]] for step in sorted(history)]
            self._references[layout] = (job.out, order)
        return self._references[layout]


def overrides(wanted: Schedule, port: int, out: Path) -> list[str]:
    """The configuration of a schedule's run, on top of the tiny task's."""
    judged = [{"name": "custom", "function": f"{JUDGE}:judged", "options": {"port": port}}]
    return [
        f"output_dir={out}",
        "algorithm=gvpo",
        f"algorithm.shapers={json.dumps(judged)}",
        LAYOUTS[wanted.layout],
        f"train.steps={STEPS}",
        f"train.prompts_per_step={PROMPTS}",
        "train.mini_batches=2",
        "train.deterministic=true",
        "data.eval=null",
        "eval.every=0",
        "checkpoint.keep=3",
        "optimizer.lr=1.5e-3",
        *wanted.overrides,
    ]


def served_overrides(engine: str, servers: Sequence[Server]) -> list[str]:
    """The servers of a run, and limits that fit a tiny model."""
    return [
        f"rollout.engine={engine}",
        f"rollout.servers.urls=[{','.join(server.link.url for server in servers)}]",
        "rollout.servers.context_length=256",
        "rollout.servers.health_timeout=5",
        "rollout.servers.start_timeout=240",
        "rollout.weights.timeout=20",
    ]
