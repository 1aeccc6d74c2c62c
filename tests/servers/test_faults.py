"""Rollout servers die, hang or refuse in the middle of a run: real processes, real signals.

In every case the run ends with every group complete and sampled from the weights of its step.
"""

from __future__ import annotations

import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from inputs.digits import TALK, talks
from servers.faults import Fault, Slowdown, check, faulty_run, kill, stop
from servers.proxy import Proxy
from servers.real_servers import SGLANG_FIRST, running
from tiny_run import records

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.core.launch import free_ports
from megatron_gvpo.observe import read_metrics
from megatron_gvpo.observe.alerts import alerts_of
from megatron_gvpo.servers.launch.supervise import Supervisor


@pytest.fixture(scope="module", params=SGLANG_FIRST)
def pair(request, task: Path, tmp_path_factory) -> Iterator[tuple[str, Supervisor]]:
    """Two servers that are restarted when they die, as `megatron-gvpo serve` does."""
    out = tmp_path_factory.mktemp("pair")
    overrides = ("rollout.servers.count=2", "rollout.servers.restarts=20", "rollout.servers.hang_timeout=60")
    with running(request.param, task, out, *overrides) as supervisor:
        yield request.param, supervisor


@pytest.mark.parametrize(
    "schedule",
    [
        "killed while pushing",
        pytest.param("killed generating and between", marks=pytest.mark.proof),
        pytest.param("hangs", marks=pytest.mark.proof),
    ],
)
def test_no_group_is_lost_or_stale(pair: tuple[str, Supervisor], task: Path, tmp_path: Path, schedule: str):
    engine, supervisor = pair
    a, b = supervisor.processes
    faults = {
        "killed generating and between": [
            Fault(2, "generating", kill(a), delay=0.05),
            Fault(4, "between", kill(b)),
        ],
        "killed while pushing": [Fault(2, "pushing", kill(b), delay=0.01)],
        "hangs": [Fault(2, "generating", stop(a, seconds=12.0), delay=0.05)],
    }[schedule]
    urls = [process.url for process in supervisor.processes]
    trainer, saboteur = faulty_run(engine, task, tmp_path / "run", urls, faults, "train.steps=6")
    check(trainer, saboteur, records(tmp_path / "run"))


@pytest.mark.proof
def test_conversations_outlive_a_server(pair: tuple[str, Supervisor], task: Path, tmp_path: Path):
    """A server dies while it holds turns: their conversations go on at the other server."""
    engine, supervisor = pair
    a, _ = supervisor.processes
    urls = [process.url for process in supervisor.processes]
    fault = Fault(2, "generating", kill(a), delay=0.3)
    talk = (*TALK, talks(), "rollout.max_tokens=100", "train.steps=4")
    trainer, saboteur = faulty_run(engine, task, tmp_path / "run", urls, [fault], *talk)
    check(trainer, saboteur, records(tmp_path / "run"))
    turns = [r.turns for groups in saboteur.groups.values() for g in groups for r in g.rollouts]
    assert max(map(len, turns)) > 1
    assert all(record["env/lost"] == 0 for record in records(tmp_path / "run") if record["step"])


@pytest.mark.proof
@pytest.mark.parametrize("pair", ["sglang"], indirect=True)
@pytest.mark.parametrize("moment", ["generating", "pushing"])
@pytest.mark.parametrize("mode", ["error", "refuse"])
def test_a_server_that_refuses_for_a_while(
    pair: tuple[str, Supervisor], task: Path, tmp_path: Path, mode: str, moment: str
):
    """From some moment on, for a while, the server answers every request with status 500, or closes its
    port.
    """
    engine, supervisor = pair
    a, b = supervisor.processes
    [port] = free_ports(1, "127.0.0.1")
    proxy = Proxy(b.url, port)

    back = threading.Timer(3.0, proxy.set, ["forward"])

    def refuse() -> None:
        proxy.set(mode)
        back.start()

    try:
        trainer, saboteur = faulty_run(
            engine, task, tmp_path / "run", [a.url, proxy.url], [Fault(2, moment, refuse)], "train.steps=5"
        )
    finally:
        back.cancel()
        proxy.close()
    check(trainer, saboteur, records(tmp_path / "run"))


@pytest.mark.proof
@pytest.mark.parametrize("pair", ["sglang"], indirect=True)
def test_a_slow_server_gets_an_alert(
    pair: tuple[str, Supervisor], task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The other rules of alerts have their real runs in tests/observe/test_alerts.py."""
    engine, supervisor = pair
    a, b = supervisor.processes
    small = ("train.steps=4", "rollout.max_tokens=40", "optimizer.lr=1.0e-6")
    patient = ("rollout.servers.health_timeout=60", "rollout.weights.timeout=120")
    urls, slow = [a.url, b.url], Slowdown(b)
    faulty_run(engine, task, tmp_path / "run", urls, [], *small, *patient, callbacks=[slow])
    alerts = alerts_of(read_metrics(tmp_path / "run/metrics.jsonl"))
    [alert] = [alert for alert in alerts if alert.rule == "slow server"]
    assert urlsplit(b.url).netloc in alert.says
    assert f"ALERT {alert}" in capsys.readouterr().out


@pytest.mark.proof
@pytest.mark.parametrize("pair", ["sglang"], indirect=True)
def test_a_disk_that_is_full_for_a_while(pair: tuple[str, Supervisor], task: Path, tmp_path: Path):
    """Pushes over files fail while no file may grow beyond 1 MB; the same step continues afterwards."""
    engine, supervisor = pair
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        threading.Timer(3.0, resource.setrlimit, [resource.RLIMIT_FSIZE, limits]).start()

    urls = [process.url for process in supervisor.processes]
    overrides = ("train.steps=4", "rollout.weights.transport=disk")
    trainer, saboteur = faulty_run(
        engine, task, tmp_path / "run", urls, [Fault(2, "generating", fill)], *overrides
    )
    check(trainer, saboteur, records(tmp_path / "run"))


@pytest.mark.proof
@pytest.mark.parametrize("pair", ["sglang"], indirect=True)
def test_a_disk_that_stays_full_ends_the_run_with_a_checkpoint_and_a_reason(
    pair: tuple[str, Supervisor], task: Path, tmp_path: Path
):
    engine, supervisor = pair
    directory = tmp_path / "weights"

    def block() -> None:
        shutil.rmtree(directory)
        directory.write_text("a file where the weights should go")

    overrides = ("rollout.weights.transport=disk", f"rollout.weights.directory={directory}")
    with pytest.raises(RolloutError, match=r"weight pushes in a row failed, at last: .*cannot be written"):
        faulty_run(
            engine,
            task,
            tmp_path / "run",
            [process.url for process in supervisor.processes],
            [Fault(2, "generating", block)],
            "train.steps=4",
            "rollout.weights.attempts=1",
            *overrides,
        )
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))
