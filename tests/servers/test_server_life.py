"""Servers are started, watched and checked on machines with proxies and all kinds of GPUs and NCCLs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.machine.processes import soon
from helpers.parts_of_a_run import serve_run
from helpers.servers.fake_servers import admit_at_once, listening
from helpers.tiny_run import configure

from megatron_gvpo.core import launch
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.launch import _environment, free_ports
from megatron_gvpo.data.task import Task
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.sampling.served import ServedEngine
from megatron_gvpo.servers import http, leader, model_requests
from megatron_gvpo.servers.handle import Asleep
from megatron_gvpo.servers.http import Http, ServerGone, open_session
from megatron_gvpo.servers.launch import serve, supervise
from megatron_gvpo.servers.launch.start import check_nccl, start_servers
from megatron_gvpo.servers.launch.supervise import ServerProcess, Supervisor, is_healthy
from megatron_gvpo.servers.leader import BackgroundLoop
from megatron_gvpo.servers.model_requests import Servers, Unanswered
from megatron_gvpo.servers.model_servers import ServerAddresses
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.server import Launch
from megatron_gvpo.servers.sglang import SGLang
from megatron_gvpo.settings.config import Config, load_config
from megatron_gvpo.settings.reward_servers import RewardServers
from megatron_gvpo.settings.servers import ServersConfig
from megatron_gvpo.weights.broadcast import Broadcast
from megatron_gvpo.weights.disk import Disk
from megatron_gvpo.weights.group import group_address
from megatron_gvpo.weights.transport import PushSettings

SOON = 60.0  # seconds


def config_of(good: Path, *overrides: str) -> Config:
    return load_config([good], ["rollout.engine=sglang", *overrides])


# --- health -------------------------------------------------------------------------------------------------


def test_health_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch):
    """Many clusters set http_proxy, but the proxy does not reach servers on the nodes."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with listening(b"HTTP/1.0 200 OK\r\n\r\n") as url:
        assert is_healthy(url, SOON)


@pytest.mark.parametrize("answer", [b"\x00\x01garbage\r\n", b""])
def test_what_is_no_web_server_is_not_healthy(answer: bytes):
    """For example, when another program took the port first."""
    with listening(answer) as url:
        assert not is_healthy(url, SOON)


# --- the supervisor -----------------------------------------------------------------------------------------


def supervised(tmp_path: Path, command: list[str], **settings: Any) -> Supervisor:
    [port] = free_ports(1, "127.0.0.1")
    process = ServerProcess(Launch(command, {}), f"http://127.0.0.1:{port}", tmp_path / "log" / "server.log")
    return Supervisor([process], ServersConfig(**settings), lambda _: None)


def failure(supervisor: Supervisor) -> str:
    deadline = time.monotonic() + SOON
    while supervisor.failed is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return supervisor.failed or "nothing failed"


def test_a_server_that_never_becomes_healthy_is_started_again(tmp_path: Path):
    supervisor = supervised(tmp_path, ["sleep", "1000"], start_timeout=0.5, restarts=1)
    with closing(supervisor):
        supervisor.start()
        why = failure(supervisor)
    assert "has not answered for rollout.servers.start_timeout=0.5 s, after 1 restarts" in why


def test_a_server_that_ends_without_ever_answering_is_started_twice_and_no_more(tmp_path: Path):
    """Fails on the old code, which started a broken interpreter four times by default."""
    supervisor = supervised(tmp_path, ["sh", "-c", f"echo start >> {tmp_path}/starts; exit 3"])
    with closing(supervisor):
        supervisor.start()
        why = failure(supervisor)
    assert "ended with status 3, after 1 restarts" in why
    assert (tmp_path / "starts").read_text() == "start\n" * 2


def test_a_server_that_cannot_be_started_again_is_a_failure(tmp_path: Path):
    """The supervisor goes on after an OSError of a restart."""
    supervisor = supervised(tmp_path, ["sh", "-c", "sleep 1000"], restarts=2)
    [process] = supervisor.processes
    process._launch = Launch(["sh", "-c", "sleep 1000"], {}, "a secret, whose file goes with the logs")
    with closing(supervisor):
        supervisor.start()
        (tmp_path / "log").rename(tmp_path / "away")
        (tmp_path / "log").write_text("no directory for a log")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        why = failure(supervisor)
    assert "cannot be used, after 2 restarts" in why


def kept_by(tmp_path: Path, *commands: list[str], **settings: Any) -> Supervisor:
    """A supervisor of a server for each command, which gets the server's port as its last words."""
    ports = free_ports(len(commands), "127.0.0.1")
    processes = [
        ServerProcess(
            Launch([*command, "--port", str(port)], {}), f"http://127.0.0.1:{port}", tmp_path / f"{port}.log"
        )
        for command, port in zip(commands, ports, strict=True)
    ]
    return Supervisor(processes, ServersConfig(**settings), lambda _: None)


def healthy(tmp_path: Path) -> list[str]:
    (tmp_path / "server.py").write_text(HEALTHY)
    return [sys.executable, str(tmp_path / "server.py")]


class Short(ServerProcess):
    """A server that answers once after every start, and has ended at the next look."""

    starts, is_alive = 0, False

    def start(self) -> None:
        self.starts, self.is_alive = self.starts + 1, True

    def exit_status(self) -> int | None:
        return None if self.is_alive else 1

    def is_healthy(self, timeout: float) -> bool:
        self.is_alive = False
        return True

    def stop(self, grace: float = 0.0) -> None: ...


@pytest.mark.parametrize("forgiven", [0.0, 1e9])
def test_restarts_long_ago_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgiven: float):
    """A run of weeks outlives a server that is lost once in a few days."""
    monkeypatch.setattr(supervise, "FORGIVEN", forgiven)
    monkeypatch.setattr(supervise, "POLL", 0.01)
    process = Short(Launch([], {}), "http://127.0.0.1:1", tmp_path / "log")
    supervisor = Supervisor([process], ServersConfig(restarts=1), lambda _: None)
    with closing(supervisor):
        supervisor.start()
        if forgiven:
            assert "ended with status 1, after 1 restarts" in failure(supervisor) and process.starts == 2
        else:
            assert soon(lambda: process.starts > 5) and supervisor.failed is None


def test_a_run_goes_on_with_the_servers_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One server is given up. Another that is just busy, or takes weights, is no reason to end the run."""
    monkeypatch.setattr(model_requests, "PAUSE", 0.0)
    supervisor = kept_by(tmp_path, ["false"], healthy(tmp_path), restarts=0)
    urls = [process.url for process in supervisor.processes]
    calls: list[str] = []

    async def call(http: Http) -> str:
        calls.append(http.url)
        if len(calls) < 3:
            raise ServerGone("a moment of trouble")
        return "an answer"

    async def check(http: Http) -> None: ...

    with closing(supervisor), a_pool(urls[1], supervisor) as (loop, pool):
        supervisor.start()
        assert "ended with status 1" in failure(supervisor)
        assert pool.hopeless() is None
        session = loop.run(open_session())
        servers = Servers(ServerAddresses("section", urls, None, supervisor), RewardServers(), session, check)
        assert loop.run(servers.ask(call)) == "an answer" and set(calls) == {*urls}
        os.killpg(supervisor.processes[1].pid or 0, signal.SIGKILL)
        assert soon(lambda: pool.hopeless() is not None)
        calls.clear()
        with pytest.raises(Unanswered, match="after 0 restarts"):
            loop.run(servers.ask(call))
        loop.run(session.close())


def test_the_key_is_removed_from_a_long_log_part_by_part(tmp_path: Path):
    """The log of a server that ran for weeks is too large to read whole."""
    log, key = tmp_path / "log", "the key " * 4
    ends = (supervise.CHUNK + 5, 2**27, 2**28)
    with log.open("wb") as stream:
        for end in ends:
            stream.seek(end - len(key))
            stream.write(key.encode())
    tracemalloc.start()
    ServerProcess(Launch([], {}, key=key), "", log).stop()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with log.open("rb") as stream:
        for end in ends:
            stream.seek(end - len(key))
            assert stream.read(len(key)) == b"*" * len(key)
    assert peak < 2**26, "the other threads of the tests allocate, too"


STARTER = """
import sys, time
from pathlib import Path
from megatron_gvpo.servers.launch.supervise import ServerProcess
from megatron_gvpo.servers.server import Launch

begins = "sleep 1000 & echo $! > $0.new; mv $0.new $0; wait"
ServerProcess(Launch(["sh", "-c", begins, sys.argv[1]], {}), "http://127.0.0.1:1", Path(sys.argv[2])).start()
time.sleep(1000)
"""


def test_a_killed_trainer_leaves_no_process_of_a_server_that_is_starting(tmp_path: Path):
    """The server has just started another process, which does not look if its parent lives."""
    number = tmp_path / "pid"
    trainer = subprocess.Popen([sys.executable, "-c", STARTER, str(number), str(tmp_path / "log")])
    assert soon(number.exists)
    trainer.kill()
    trainer.wait()
    process = Path(f"/proc/{int(number.read_text())}/cmdline")
    assert soon(lambda: not process.exists() or not process.read_text())  # a dead one's is empty


def test_servers_listen_where_no_connection_gets_its_port(monkeypatch: pytest.MonkeyPatch):
    """A connection that has the port of a server, or of the ranks' meeting, would keep it from listening."""
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports = free_ports(50, "127.0.0.1")
    ports.append(int(_environment(2)["MASTER_PORT"]))
    assert len(set(ports[:50])) == 50 and max(ports) < 30_000
    assert int(ephemeral[0]) < 30_000 or not any(port in range(*map(int, ephemeral)) for port in ports)
    with socket.socket() as taken, pytest.raises(OSError, match="not free"):
        taken.bind(("127.0.0.1", ports[0]))
        monkeypatch.setattr(launch, "PORTS", range(ports[0], ports[0] + 1))
        free_ports(1, "127.0.0.1")


def test_a_secret_is_in_a_file_of_this_users_alone_while_the_server_lives(tmp_path: Path):
    read = ["sh", "-c", 'cat "$0"; sleep 1000']  # its path is the last word
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    process = ServerProcess(Launch(read, {}, "a secret"), "http://127.0.0.1:1", log)
    for _ in range(2):
        process.start()
        [file] = tmp_path.glob("*.yaml")
        assert {path.stat().st_mode & 0o777 for path in (file, log)} == {0o600}
        deadline = time.monotonic() + SOON
        while not log.read_text().endswith("a secret") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert log.read_text().endswith("a secret")
        process.stop()
        assert list(tmp_path.iterdir()) == [log]
        log.write_text("")


def launched(config: Config, key: str | None) -> Launch:
    return SGLang.launch(config.model, config.rollout, ModelCards(config), 1, key, False)


def test_sglangs_key_is_not_on_its_command_line(good: Path):
    launch = launched(config_of(good, "rollout.servers.args=[--own, '1']"), "the key")
    assert not any("the key" in word for word in (*launch.command, *launch.environment.values()))
    assert launch.command[-3:] == ["--own", "1", "--config"] and "the key" in launch.secret
    assert launched(config_of(good), None).secret == ""
    with pytest.raises(ConfigError, match=r"rollout\.servers\.args: SGLang takes one --config"):
        launched(config_of(good, "rollout.servers.args=[--config, own.yaml]"), "the key")


@pytest.mark.parametrize("asleep", [None, Asleep(("cache",), "0")])
def test_a_server_that_keeps_a_colocated_trainers_memory_is_ended(tmp_path: Path, asleep: Asleep | None):
    """The server does not answer the order to release it, or reclaimed a part in a push that failed."""
    supervisor = supervised(tmp_path, ["sleep", "1000"])
    [process] = supervisor.processes
    process.start()
    assert process.pid is not None and Path(f"/proc/{process.pid}").exists()
    pid = process.pid
    with a_pool(process.url, supervisor) as (loop, pool):
        admit_at_once(pool, 0)
        pool.handles[0].asleep = asleep
        loop.run(pool.sleep())
        assert pool.handles[0].is_lost
    assert not Path(f"/proc/{pid}").exists()
    process.stop()


def test_a_server_that_ended_has_all_of_its_memory_when_it_is_back():
    [port] = free_ports(1, "127.0.0.1")
    with a_pool(f"http://127.0.0.1:{port}") as (loop, pool):
        [handle] = pool.handles
        handle.asleep = Asleep(("cache",), "0")  # in the middle of a push
        watch = loop.submit(pool._watch(handle))
        deadline = time.monotonic() + SOON
        while handle.asleep and time.monotonic() < deadline:
            time.sleep(0.05)
        watch.cancel()
        assert handle.asleep is None


def test_the_time_in_which_a_trainer_has_the_memory_does_not_count_against_a_lost_server():
    """Responses that were carried over wait for it meanwhile, and nothing starts it."""
    with a_pool("http://127.0.0.1:1", start_timeout=0.2) as (loop, pool):
        time.sleep(0.3)
        assert pool.hopeless() is not None
        loop.run(pool.sleep())
        assert pool.hopeless() is None
        pool.wake()
        assert pool.hopeless() is None
        time.sleep(0.3)
        assert pool.hopeless() is not None


@contextmanager
def a_pool(
    url: str, supervisor: Supervisor | None = None, start_timeout: float = 900.0
) -> Iterator[tuple[BackgroundLoop, ServerPool]]:
    """A pool of the server at `url`, whose health nobody watches."""
    settings = ServersConfig(start_timeout=start_timeout)
    loop = BackgroundLoop("test client")
    session = loop.run(open_session())
    yield loop, ServerPool([SGLang(Http(session, url))], settings, [], print, supervisor)
    loop.run(session.close())
    loop.close()


def test_logs_that_cannot_be_written_are_said_to_be_the_reason(good: Path, task: Path, tmp_path: Path):
    (tmp_path / "run").write_text("a file")
    config = config_of(good, f"model.path={task}/model", f"output_dir={tmp_path}/run")
    with pytest.raises(
        ConfigError, match=r"cannot be started: .*run/servers'\. Their logs go to .*run/servers;"
    ):
        start_servers(config.model, config.rollout, config.output_dir, ModelCards(config), None, print)


def test_an_interrupted_start_leaves_no_server(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For example, by Ctrl-C in a Python session, which goes on."""
    started = tmp_path / "pid"

    def interrupt(word: object) -> None:
        deadline = time.monotonic() + SOON
        while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(leader, "broadcast_msgpack", interrupt)
    monkeypatch.setattr(leader, "HEARTBEAT", 0.1)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    server = interpreter(tmp_path, f"echo $$ > {started}\nexec sleep 1000")
    config = configure(task, tmp_path / "run", "rollout.engine=sglang", server)
    engine = ServedEngine(
        config.model, config.rollout, config.output_dir, ModelCards(config), Task(None, (1,), [], []), None
    )  # type: ignore[arg-type] # nothing is sampled
    with pytest.raises(KeyboardInterrupt):
        engine.__enter__()
    assert not Path(f"/proc/{int(started.read_text())}").exists()


def test_the_end_of_a_long_log_is_read_alone(tmp_path: Path):
    """The log of a server that ran for weeks is too large to read whole."""
    log = tmp_path / "log"
    log.write_bytes(b"old\n")
    os.truncate(log, 2**28)
    with log.open("ab") as stream:
        stream.write(b"\n" + b"".join(b"line %d\n" % i for i in range(100)))
    tracemalloc.start()
    lines = ServerProcess(Launch([], {}), "", log).tail().split("\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [line.strip() for line in lines] == [f"line {i}" for i in range(80, 100)]
    assert peak < 2**26, "the other threads of the tests allocate, too"


HEALTHY = """
import http.server, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

address = "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(address, Healthy).serve_forever()
"""


def test_the_servers_of_a_machine_outlive_one_that_cannot_be_kept(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For example, one whose GPU has failed."""
    (tmp_path / "server.py").write_text(HEALTHY)
    python = interpreter(tmp_path, f'exec {sys.executable} {tmp_path}/server.py "$@"')
    own = ("rollout.engine=sglang", python, "rollout.servers.count=2", "rollout.servers.restarts=0")
    started: list[Supervisor] = []
    alive: list[bool] = []

    def start(*arguments: Any) -> Supervisor:
        started.append(start_servers(*arguments))
        return started[0]

    def strike() -> None:
        assert soon(lambda: bool(started) and all(p.is_healthy(5.0) for p in started[0].processes))
        time.sleep(3.0)  # until `serve` has seen it, too
        [doomed, other] = started[0].processes
        os.killpg(doomed.pid or 0, signal.SIGKILL)
        soon(lambda: started[0].failed is not None)
        time.sleep(3.0)
        alive.append(other.is_healthy(5.0))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(serve, "start_servers", start)
    striking = threading.Thread(target=strike)
    previous = signal.signal(signal.SIGTERM, lambda *_: None)  # where `serve` has ended before
    striking.start()
    code = serve_run(configure(task, tmp_path / "run", *own))
    striking.join()
    signal.signal(signal.SIGTERM, previous)
    assert alive == [True] and code == 1


# --- where they run, and what with --------------------------------------------------------------------------


def interpreter(directory: Path, says: str) -> str:
    """An interpreter that says it has this NCCL, because torch on a CPU has none."""
    python = directory / "python"
    python.write_text(f"#!/bin/sh\n{says}\n")
    python.chmod(0o755)
    return f"rollout.servers.python={python}"


def test_a_name_that_others_know_by_another_address_is_refused(task: Path, tmp_path: Path, monkeypatch):
    """Debian's /etc/hosts has `127.0.1.1 node7` on node7: the trainer would wait for `start_timeout`."""
    monkeypatch.setattr(socket, "gethostbyname", {"node7": "127.0.1.1"}.__getitem__)
    config = configure(task, tmp_path / "run", "rollout.engine=sglang", "rollout.servers.host=node7")
    with pytest.raises(ConfigError, match=r"rollout\.servers\.host=node7: /etc/hosts gives it 127\.0\.1\.1"):
        serve_run(config)


def test_an_engine_with_another_nccl_is_refused_before_it_starts(good: Path, tmp_path: Path):
    other = config_of(good, interpreter(tmp_path, "echo 2.31.2"))
    with pytest.raises(ConfigError, match=r"NCCL 2\.31\.2, the trainer's has 2\.30\.7.*transport=broadcast"):
        check_nccl(other.rollout, "2.30.7")
    check_nccl(other.rollout, "2.31.2")
    check_nccl(
        config_of(good, interpreter(tmp_path, "echo 1"), "rollout.weights.transport=disk").rollout, "2.30.7"
    )
    check_nccl(
        config_of(good, interpreter(tmp_path, "exit 1")).rollout, "2.30.7"
    )  # no torch: its start says so
    check_nccl(config_of(good, "rollout.servers.python=/nowhere").rollout, "2.30.7")


def pushed(config: Config) -> PushSettings:
    return PushSettings.of(
        config.model, config.rollout, config.output_dir, ModelCards(config), torch.device("cpu")
    )


def test_remote_servers_cannot_meet_the_trainer_on_loopback(good: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    remote = "rollout.servers.urls=[http://192.0.2.1:30000]"  # an address of documentation: nobody's
    with pytest.raises(
        ConfigError, match=r"weights\.address: .*192\.0\.2\.1:30000 cannot meet .* localhost \(the"
    ):
        Broadcast.check(pushed(config_of(good, remote)))
    assert group_address(config_of(good, remote, "rollout.weights.address=10.0.0.1").rollout) == "10.0.0.1"
    Disk.check(pushed(config_of(good, remote, "rollout.weights.transport=disk")))
    local = "rollout.servers.urls=[http://127.0.0.2:30000]"
    assert group_address(config_of(good, local).rollout) == "localhost"
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert group_address(config_of(good, remote).rollout) == "node1"


def test_an_address_that_nobody_knows_is_refused_before_a_push(good: Path):
    with pytest.raises(ConfigError, match=r"rollout\.weights\.address=no\.such\.invalid is not a known host"):
        Broadcast.check(pushed(config_of(good, "rollout.weights.address=no.such.invalid")))


# --- what the user reads ------------------------------------------------------------------------------------


def call(url: str, timeout: float = SOON) -> None:
    loop = BackgroundLoop("test client")
    session = loop.run(open_session())
    try:
        loop.run(Http(session, url).get("/health", timeout=timeout))
    finally:
        loop.run(session.close())
        loop.close()


def test_a_node_that_takes_no_connection_is_not_said_to_be_slow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "CONNECT", 0.2)
    with listening(None) as url:
        port = int(url.rsplit(":", 1)[1])
        waiting = [socket.socket() for _ in range(8)]  # until the queue is full
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        with pytest.raises(ServerGone, match=r"/health: no connection within 0\.2 s"):
            call(url)
        for each in waiting:
            each.close()
