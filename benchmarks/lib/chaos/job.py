"""Runs a `train` command as Slurm would: repeatedly, with --resume=auto, until the last step is complete."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lib.chaos.schedules import ENDS, Fault
from lib.chaos.strikes import NotYet, Scene
from megatron_gvpo.core.json_files import read_metrics

RESUME = "--resume=auto"
FRUITLESS = 5  # starts in a row without a newer checkpoint, after which the job of `megatron-gvpo slurm` ends
POLL = 0.01


class ChaosError(AssertionError):
    """A run that did not survive its faults."""


class Running(Protocol):
    """A command that was started: starter.Command, or a subprocess."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def end(self) -> None: ...


@dataclass
class Start:
    """One start of the command."""

    begin: float  # seconds since the job's begin
    seconds: float = 0.0
    code: int | None = None
    first_step_after: float | None = None  # seconds from this start to the first step that it recorded
    last_step: int = 0  # the last step that it recorded


@dataclass
class Job:
    """A run of `steps` steps in `out`, with faults. `start(options)` starts the command."""

    start: Callable[[Sequence[str]], Running]
    out: Path
    log: Path
    scene: Scene
    faults: Sequence[Fault]
    steps: int
    patience: float = 300.0  # seconds without a new record or an end, after which the run counts as hanging
    starts: list[Start] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Start the command again and again until the run is complete. Raises ChaosError."""
        self._remaining, self._began = list(self.faults), time.monotonic()
        fruitless = 0
        while not self.done():
            before = self._newest()
            self._once()
            fruitless = 0 if self._newest() != before else fruitless + 1
            if fruitless > FRUITLESS:
                raise ChaosError(f"{fruitless} starts in a row without a newer checkpoint:\n{self.tail()}")
        self.scene.rest()

    def done(self) -> bool:
        """True once a start has ended well, and not because of a request to stop."""
        ended_well = bool(self.starts) and self.starts[-1].code == 0
        return ended_well and (self.out / "hf").exists() and self.last_step() == self.steps

    def last_step(self) -> int:
        try:
            records = read_metrics(self.out / "metrics.jsonl")
        except FileNotFoundError:
            return 0
        return max((int(record["step"]) for record in records), default=0)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def _once(self) -> None:
        command = self.start([RESUME])
        self.starts.append(start := Start(time.monotonic() - self._began))
        scene, self._ending = self.scene, False
        scene.pid, scene.ended = command.pid, lambda: command.poll() is not None
        begin = last_change = time.monotonic()
        size, step, since = -1, self.last_step(), begin
        try:
            while (code := command.poll()) is None:
                now = time.monotonic()
                if (new_size := self._size()) != size:
                    size, last_change = new_size, now
                    if (reached := self.last_step()) != step:
                        if reached > step and start.first_step_after is None:
                            start.first_step_after = now - begin
                        step, since = reached, now
                if now - last_change > self.patience:
                    raise ChaosError(f"nothing has happened for {self.patience:.0f} s:\n{self.tail()}")
                self._strike(step + 1, now - since, now - begin)
                time.sleep(POLL)
            start.code = code
        finally:
            command.end()
            start.seconds, start.last_step = time.monotonic() - begin, self.last_step()

    def _strike(self, step: int, in_step: float, since_start: float) -> None:
        """Commit the next fault, if its moment has come. `step` began `in_step` seconds ago."""
        if not self._remaining or self._ending:
            return
        fault = self._remaining[0]
        if fault.moment == "starting":
            due = len(self.starts) > 1 and step >= fault.step and since_start >= fault.delay
            due = due or step >= min(fault.step + 3, self.steps)  # the command was not started again
        elif fault.moment == "saving":
            recorded = step - 1  # a step is recorded before it is saved
            due = recorded >= fault.step and (self._saving() or recorded > fault.step + 3)
            if due:
                time.sleep(fault.delay)
        else:
            due = step > fault.step or (step == fault.step and in_step >= fault.delay)
        if not due:
            return
        try:
            self.scene.strike(fault)
        except NotYet:
            return
        self._remaining.pop(0)
        self._ending = fault.kind in ENDS
        when = time.monotonic() - self._began
        self.struck.append(f"{when:.1f} s, step {step}: {fault}")

    def _saving(self) -> bool:
        return any((self.out / "checkpoints").glob("step_*.partial"))

    def _size(self) -> int:
        try:
            return (self.out / "metrics.jsonl").stat().st_size
        except FileNotFoundError:
            return 0

    def _newest(self) -> tuple[str, int] | None:
        """The newest complete checkpoint's name, and its state's checksum, as Slurm's job script has them."""
        files = sorted((self.out / "checkpoints").glob("step_????????/state.json"))
        return (files[-1].parent.name, zlib.crc32(files[-1].read_bytes())) if files else None


def ledger_of(file: Path) -> list[dict[str, Any]]:
    """The judge's entries. A last incomplete line is left out: the judge was killed before its answer."""
    lines = file.read_text().splitlines() if file.exists() else []
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries
