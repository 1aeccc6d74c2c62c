"""In a Slurm job colocated servers start after every rank of the trainer has given its memory away."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from helpers.distributed import launch
from helpers.parts_of_a_run import serve_run
from helpers.tiny_run import configure

from megatron_gvpo.core import clock
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.sampling.served import ServedEngine
from megatron_gvpo.servers.launch import first_turn, serve
from megatron_gvpo.settings.config import Config

SERVERS = ("rollout.engine=vllm", "rollout.servers.colocated=true", "rollout.weights.transport=shared")


class Supervisor:
    """Stands for that of servers which can no longer be kept running."""

    processes = ()
    failed = "it has ended"

    def none_left(self) -> str:
        return self.failed

    def close(self) -> None: ...


def serve_in_job(config: Config, monkeypatch: pytest.MonkeyPatch, logs: Path) -> tuple[list[float], object]:
    """When servers started, and the thread in which `serve` runs."""
    started: list[float] = []

    def start(*_: object) -> Supervisor:
        started.append(time.monotonic())
        return Supervisor()

    logs.mkdir()
    monkeypatch.setenv(first_turn.LOGS, str(logs))
    monkeypatch.setattr(first_turn, "POLL", 0.05)
    monkeypatch.setattr(serve, "start_servers", start)
    monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)  # the test's thread is not the first
    thread = threading.Thread(target=lambda: serve_run(config), daemon=True)
    thread.start()
    return started, thread


@pytest.mark.parametrize("colocated", [True, False])
def test_colocated_servers_wait_for_the_trainer(colocated, task, tmp_path, monkeypatch):
    own = ("rollout.servers.colocated=false", "rollout.weights.transport=broadcast")
    config = configure(task, tmp_path, *SERVERS, *(() if colocated else own))
    started, thread = serve_in_job(config, monkeypatch, tmp_path / "logs")
    time.sleep(0.5)
    assert bool(started) != colocated
    released = time.monotonic()
    first_turn.give_turn()
    thread.join(20)
    assert len(started) == 1 and (started[0] > released) == colocated


def test_servers_that_wait_end_when_they_are_told_to(tmp_path, monkeypatch):
    monkeypatch.setenv(first_turn.LOGS, str(tmp_path))
    is_told_to_stop = threading.Event()
    threading.Timer(0.2, is_told_to_stop.set).start()
    assert not first_turn.wait_for_turn(is_told_to_stop, 20.0, print)


def test_a_trainer_that_hangs_is_named_and_the_wait_is_reported(tmp_path, monkeypatch):
    """On the old code the servers of a job waited without an end, and said nothing."""
    monkeypatch.setenv(first_turn.LOGS, str(tmp_path))
    monkeypatch.setattr(first_turn, "POLL", 0.02)
    monkeypatch.setattr(first_turn, "REPORT_EVERY", 0.1)
    messages: list[str] = []
    log = re.escape(f"{tmp_path}/rank_00000.log")
    problem = rf"the trainer of this job \(its log: {log}\) has not .* parallel\.timeout_seconds=0\.5 s"
    with pytest.raises(RolloutError, match=problem):
        first_turn.wait_for_turn(threading.Event(), 0.5, messages.append)
    assert 2 <= len(messages) <= 4
    assert all(
        re.match(rf"servers have waited for 0 of 0\.5 s until the trainer .*{log}", m) for m in messages
    )


def test_outside_a_job_nobody_waits(monkeypatch):
    monkeypatch.delenv(first_turn.LOGS, raising=False)
    first_turn.give_turn()
    assert first_turn.wait_for_turn(threading.Event(), 0.0, print)


def test_the_trainer_says_so_after_its_slowest_rank(tmp_path: Path):
    launch("test_first_turn:enter", [2], str(tmp_path))


def enter(logs: str) -> None:
    """A rank: its memory is released late, the later the higher the rank."""
    import os

    os.environ[first_turn.LOGS] = logs
    rank, file = dist.get_rank(), Path(logs, first_turn.FILE)

    def release(part: str) -> None:
        time.sleep(0.3 * rank)
        assert not file.exists(), f"rank {rank} has not released its {part}"

    def start() -> None:
        assert file.exists(), "servers are looked for after they may start"
        raise InterruptedError

    engine = ServedEngine.__new__(ServedEngine)
    engine._memory = SimpleNamespace(release=release)
    engine._start, engine._close = start, lambda: None
    if rank == 0:
        with pytest.raises(InterruptedError):
            engine.__enter__()
    else:
        engine._memory.release("training")
        engine._give_weights()
    dist.barrier()


class Stopped:
    """Stands for the event that tells `serve` to stop: the process itself is stopped at the first look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
        self._monkeypatch, self._then, self._looks = monkeypatch, then, 0

    def wait(self, _: float) -> bool:
        self._looks += 1
        if self._looks == 1:
            now = time.monotonic()
            self._monkeypatch.setattr(time, "monotonic", lambda: now + 100)  # as after `scontrol suspend`
        elif self._looks == 2:
            self._then()
        return self._looks > 3


def test_no_limit_of_a_start_counts_the_time_in_which_the_job_is_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(clock, "_clock", clock._Clock())
    monkeypatch.setenv(first_turn.LOGS, str(tmp_path))
    stop = Stopped(monkeypatch, first_turn.give_turn)
    assert first_turn.wait_for_turn(stop, 10.0, print)

    monkeypatch.setattr(clock, "_clock", clock._Clock())
    healthy: list[bool] = []
    server = SimpleNamespace(url="http://here:1", log="log", is_healthy=lambda _: bool(healthy))
    supervisor = SimpleNamespace(processes=[server], failed=None, none_left=lambda: None)
    stop = Stopped(monkeypatch, lambda: healthy.append(True))
    assert serve._run_until_stopped(supervisor, SimpleNamespace(start_timeout=10.0, node=0), stop) == 0
    assert "ready: rollout.servers.urls=[http://here:1]" in capsys.readouterr().out
