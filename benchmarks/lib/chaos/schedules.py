"""Chaos schedules: the faults of a run, and its configuration, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

STEPS = 12
Engine = Literal["embedded", "served"]
Layout = Literal["dp2", "tp2"]
Moment = Literal["step", "saving", "starting"]

# Kinds of faults by the parts of a run that they hit. A stop is SIGSTOP, and SIGCONT after `seconds`; a kill
# is SIGKILL. The suite starts a killed judge again after `seconds`, as its operator would.
PROCESSES = ("kill rank", "stop rank", "lose node", "kill reward worker", "stop reward worker")
SERVICES = ("kill judge", "stop judge")
SURROUNDINGS = ("fill disk", "jump clock", "corrupt checkpoint", "tell to stop")
SERVERS = ("kill server", "stop server", "slow link", "cut link", "close link")
EMBEDDED = (*PROCESSES, *SERVICES, *SURROUNDINGS)
SERVED = (*EMBEDDED, *SERVERS, *SERVERS)  # twice: half of the faults of these runs hit servers
LASTING = {"stop rank", "stop reward worker", "kill judge", "stop judge", "fill disk"}
ENDS = {"kill rank", "lose node", "corrupt checkpoint", "tell to stop"}  # these faults end the command
# Kinds of faults that may strike while a checkpoint is written, or while the command starts.
WHILE_SAVING = {"kill rank", "lose node", "tell to stop", "fill disk"}
WHILE_STARTING = {"kill rank", "lose node", "tell to stop"}


@dataclass(frozen=True)
class Fault:
    """One fault: it strikes `delay` seconds after `moment` of `step` (counted from 1) has begun.

    `seconds`: how long it lasts. `victim`: the rank or server. `size`: a further number for some kinds, such
    as the seconds by which a clock jumps.
    """

    kind: str
    step: int
    moment: Moment = "step"
    delay: float = 0.0
    seconds: float = 0.0
    victim: int = 0
    size: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        size = f" by {self.size:+.0f} s" if self.kind == "jump clock" else ""
        victim = f" {self.victim}" if self.kind.endswith(("rank", "worker", "server", "link")) else ""
        when = {"step": "in", "saving": "while saving in", "starting": "while starting after"}[self.moment]
        return f"{self.kind}{victim}{size}{lasting} {when} step {self.step} ({self.delay:.2f} s)"


@dataclass(frozen=True)
class Schedule:
    """A run and its faults, in the order of their steps."""

    seed: int
    engine: Engine
    layout: Layout
    overrides: tuple[str, ...]
    faults: tuple[Fault, ...]

    @property
    def moves_clock(self) -> bool:
        return any(fault.kind == "jump clock" for fault in self.faults)

    @property
    def on_two_nodes(self) -> bool:
        """True if rank 1 is on the second server's node, and relays weights to that server."""
        return any("=shared" in override for override in self.overrides)


def schedule(seed: int, engine: Engine) -> Schedule:
    """Return the schedule of a seed: two to four faults in a run of STEPS steps on two ranks."""
    rng = random.Random(f"{engine} {seed}")
    kinds = EMBEDDED if engine == "embedded" else SERVED
    # The first fault's kind follows from the seed, so that all kinds are equally frequent in consecutive
    # seeds.
    chosen = [kinds[seed % len(kinds)], *(rng.choice(kinds) for _ in range(rng.randint(1, 3)))]
    steps = sorted(rng.sample(range(2, STEPS), len(chosen)))
    rng.shuffle(chosen)
    faults = tuple(_fault(rng, kind, step) for kind, step in zip(chosen, steps, strict=True))
    overrides: tuple[str, ...] = (
        f"checkpoint.every={rng.choice([1, 1, 2, 3])}",
        f"checkpoint.asynchronous={rng.choice(['true', 'false'])}",
    )
    if engine == "served":
        overrides += (f"rollout.weights.transport={rng.choice(['broadcast', 'delta', 'shared', 'disk'])}",)
    layouts: list[Layout] = ["dp2", "tp2"]
    return Schedule(seed, engine, rng.choice(layouts), overrides, faults)


def _fault(rng: random.Random, kind: str, step: int) -> Fault:
    moments: list[Moment] = ["step", "step"]
    moments += ["saving"] if kind in WHILE_SAVING else []
    moments += ["starting"] if kind in WHILE_STARTING else []
    moment = rng.choice(moments)
    delay = rng.uniform(0, {"step": 0.8, "saving": 0.02, "starting": 2.0}[moment])
    seconds = rng.uniform(0.5, 4.0) if kind in LASTING else 0.0
    if kind in ("stop server", "slow link", "cut link", "close link"):
        seconds = rng.uniform(1.0, 12.0)
    size = rng.choice([-86400.0, -3600.0, -10.0, 10.0, 3600.0, 86400.0]) if kind == "jump clock" else 0.0
    return Fault(kind, step, moment, delay, seconds, rng.randint(0, 1), size)
