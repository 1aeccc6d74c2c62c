"""Runs whose rollout servers are killed, stopped or made to refuse at chosen moments, and checks of their
results.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from helpers.servers.real_servers import served_config
from helpers.tiny_run import fit
from megatron_gvpo.groups import Group
from megatron_gvpo.servers.handle import Receiving
from megatron_gvpo.servers.launch.supervise import ServerProcess
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer

Moment = Literal["generating", "pushing", "between"]


@dataclass(frozen=True)
class Fault:
    """An `action` that happens once: in `step`, `delay` seconds after `moment`."""

    step: int
    moment: Moment
    action: Callable[[], None]
    delay: float = 0.0


@dataclass
class Saboteur(Callback):
    """Commits the faults from a thread that watches the run, and keeps the groups that the trainer got."""

    faults: list[Fault]
    groups: dict[int, list[Group]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def on_start(self, trainer: Trainer) -> None:
        self._trainer, self._over = trainer, threading.Event()
        next_batch = trainer.components.batches.next_batch

        def recorded(step: int) -> list[Group]:
            groups = next_batch(step)
            self.groups[step] = groups
            return groups

        trainer.components.batches.next_batch = recorded
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def on_exit(self, trainer: Trainer) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        remaining = list(self.faults)
        while remaining and not self._over.wait(0.001):
            for fault in list(remaining):
                if self._trainer.step + 1 >= fault.step and self._moment() == fault.moment:
                    time.sleep(fault.delay)
                    fault.action()
                    self.done.append(f"{fault.moment} in step {self._trainer.step + 1}")
                    remaining.remove(fault)

    def _moment(self) -> Moment:
        pool: ServerPool = self._trainer.components.engine.servers.pool
        if any(isinstance(handle.state, Receiving) for handle in pool.handles):
            return "pushing"
        return "generating" if any(handle.calls for handle in pool.handles) else "between"


def kill(process: ServerProcess) -> Callable[[], None]:
    """Action that sends SIGKILL to the server's process group, like an out-of-memory kill or a lost node."""
    return lambda: _hit(process, 0.0)


def stop(process: ServerProcess, seconds: float) -> Callable[[], None]:
    """Action that sends SIGSTOP, and SIGCONT after `seconds`, like a hanging node."""
    return lambda: _hit(process, seconds)


def _hit(process: ServerProcess, seconds: float) -> None:
    if process.pid is not None:
        signal_for_a_while(process.pid, seconds, group=True)


def signal_for_a_while(pid: int, seconds: float, *, group: bool) -> threading.Timer | None:
    """Send SIGKILL; or, if `seconds` is not 0, SIGSTOP, and return a timer that sends SIGCONT after them.

    `group`: to the process group that `pid` leads.
    """
    send = os.killpg if group else os.kill

    def signal_if_there(number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            send(pid, number)

    if not seconds:
        return signal_if_there(signal.SIGKILL)
    signal_if_there(signal.SIGSTOP)
    timer = threading.Timer(seconds, signal_if_there, [signal.SIGCONT])
    timer.start()
    return timer


class Slowdown(Callback):
    """Lets a server run for a tenth of the time while it generates, as on a busy machine."""

    def __init__(self, process: ServerProcess) -> None:
        assert process.pid is not None
        self._url, self._pid, self._over = process.url, process.pid, threading.Event()

    def on_start(self, trainer: Trainer) -> None:
        self._pool: ServerPool = trainer.components.engine.servers.pool
        self._thread = threading.Thread(target=self._stop_again_and_again, daemon=True)
        self._thread.start()

    def on_exit(self, trainer: Trainer) -> None:
        self._over.set()
        self._thread.join()

    def _stop_again_and_again(self) -> None:
        [handle] = [handle for handle in self._pool.handles if handle.server.url == self._url]
        while not self._over.wait(0.03):
            if handle.calls and not isinstance(handle.state, Receiving):
                os.killpg(self._pid, signal.SIGSTOP)
                self._over.wait(0.3)
                os.killpg(self._pid, signal.SIGCONT)


def faulty_run(
    engine: str,
    task: Path,
    out: Path,
    urls: list[str],
    faults: list[Fault],
    *overrides: str,
    callbacks: Sequence[Callback] = (),
) -> tuple[Trainer, Saboteur]:
    """Train a few steps with updates so large that old weights would give clearly different log-probs."""
    saboteur = Saboteur(faults)
    config = served_config(
        engine,
        task,
        out,
        f"rollout.servers.urls=[{','.join(urls)}]",
        "rollout.servers.health_timeout=3",
        "rollout.servers.start_timeout=240",
        "rollout.weights.timeout=20",
        "train.prompts_per_step=8",
        "rollout.n=4",
        "rollout.max_tokens=100",
        "optimizer.lr=3.0e-3",
        "eval.every=0",
        "data.eval=null",
        "checkpoint.export_hf=false",
        *overrides,
    )
    trainer = fit(config, [saboteur, *callbacks], overwrite=True)
    return trainer, saboteur


def check(trainer: Trainer, saboteur: Saboteur, records: list[dict[str, Any]]) -> None:
    """Assert that every fault happened, every group is complete, and every response has its step's
    weights.
    """
    steps, n = trainer.config.train.steps, trainer.config.rollout.n
    assert len(saboteur.done) == len(saboteur.faults), saboteur.done
    assert trainer.step == steps and sorted(saboteur.groups) == list(range(1, steps + 1))
    for step, groups in saboteur.groups.items():
        assert len(groups) == trainer.config.train.prompts_per_step
        for group in groups:
            assert len(group.rollouts) == n
            for rollout in group.rollouts:
                assert rollout.finish_reason in ("stop", "length")
                assert len(rollout.token_ids) == len(rollout.logprobs) > 0
                assert rollout.weight_version == step - 1 and len(rollout.spans) == 1
    for record in records:
        if record["step"]:
            assert record["mismatch/abs_max"] < 2e-3, record  # stale or mixed weights would show here
