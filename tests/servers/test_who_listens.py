"""A key goes to the server that was started, never to another process that listens at its address."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.parts_of_a_run import serve_run

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.launch import free_ports
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.http import Http, ServerGone, ServerRefused, open_session
from megatron_gvpo.servers.launch.start import start_servers
from megatron_gvpo.servers.launch.supervise import ServerProcess, Supervisor, is_healthy
from megatron_gvpo.servers.leader import BackgroundLoop
from megatron_gvpo.servers.server import Launch
from megatron_gvpo.settings.config import Config, load_config
from megatron_gvpo.settings.servers import ServersConfig

SOON = 60.0  # seconds
KEY = "0123456789abcdef"
# Stands for an engine: it answers 200 at the port that is its first argument, after printing its key.
SERVER = f"""
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{{}}")
    def log_message(self, *_): pass
print("server_args(api_key='{KEY}')", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


@contextmanager
def a_stranger(
    answer: bytes = b"HTTP/1.0 200 OK\r\n\r\n{}", host: str = "127.0.0.1"
) -> Iterator[tuple[int, list[bytes]]]:
    """(port, requests) of a process, this one, that answers everybody."""
    requests: list[bytes] = []
    with socket.socket() as server:
        server.bind((host, 0))
        server.listen(16)

        def run() -> None:
            try:
                while True:
                    client, _ = server.accept()
                    with client:
                        requests.append(client.recv(4096))
                        client.sendall(answer)
            except OSError:  # closed
                pass

        threading.Thread(target=run, daemon=True).start()
        yield server.getsockname()[1], requests
        server.shutdown(socket.SHUT_RDWR)


def config_of(good: Path, *overrides: str) -> Config:
    return load_config([good], ["rollout.engine=sglang", *overrides])


def get(http_of: Callable[[Any], Http], path: str = "/health") -> None:
    loop = BackgroundLoop("test client")
    session = loop.run(open_session())
    try:
        loop.run(http_of(session).get(path, timeout=SOON))
    finally:
        loop.run(session.close())
        loop.close()


class Stopped:
    """Stops the process when it is closed."""

    def __init__(self, process: ServerProcess) -> None:
        self.close = lambda: process.stop(grace=1.0)


def test_a_port_that_another_process_has_is_refused_by_name(good: Path, tmp_path: Path):
    with a_stranger() as (port, requests):
        taken = config_of(good, f"rollout.servers.port={port}", f"output_dir={tmp_path}/run")
        with pytest.raises(
            ConfigError,
            match=rf"servers\.port={port}: 127\.0\.0\.1:{port}: in use by process {os.getpid()} \(",
        ):
            serve_run(taken)
        assert requests == []


@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ("host=no.such.host.invalid", r"rollout\.servers\.host=no\.such\.host\.invalid: "),
        ("host=192.0.2.1, port: 30000", r"rollout\.servers\.host=192\.0\.2\.1, .*30000: Cannot assign"),
    ],
)
def test_an_address_where_no_server_can_listen_is_named(
    servers: str, problem: str, good: Path, tmp_path: Path
):
    own = "{" + servers.replace("=", ": ") + "}"
    config = config_of(good, f"rollout.servers={own}", f"output_dir={tmp_path}")
    with pytest.raises(ConfigError, match=problem):
        start_servers(config.model, config.rollout, config.output_dir, ModelCards(config), None, print)


def test_servers_that_others_reach_need_a_key(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ROLLOUT_KEY", raising=False)
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(
            ConfigError, match=r"without a key everyone .* export ROLLOUT_KEY=\$\(openssl rand"
        ):
            serve_run(config_of(good, f"rollout.servers.host='{host}'", f"output_dir={tmp_path}"))
    with pytest.raises(ConfigError, match=r"rollout\.servers\.api_key_env: \$ROLLOUT_KEY is not set"):
        serve_run(config_of(good, "rollout.servers.api_key_env=ROLLOUT_KEY", f"output_dir={tmp_path}"))


def test_only_the_process_that_was_started_gets_the_key(tmp_path: Path):
    """A stranger takes the port before the server does, and another one after it has died."""
    with a_stranger() as (port, requests):
        process = ServerProcess(
            Launch(["sleep", "1000"], {}, key=KEY), f"http://127.0.0.1:{port}", tmp_path / "log"
        )
        process.start()
        with closing(Stopped(process)):
            assert is_healthy(process.url, SOON) and not process.is_healthy(SOON)
            assert str(os.getpid()) in (process.stranger() or "")
            before = len(requests)
            with pytest.raises(
                ServerGone, match=r"/health: the server that was started does not listen there"
            ):
                get(lambda session: Http(session, process.url, KEY, process.listens))
            assert len(requests) == before


def test_a_server_is_known_until_it_ends_and_its_log_forgets_the_key(tmp_path: Path):
    [port] = free_ports(1, "127.0.0.1")
    command = [sys.executable, "-c", SERVER, str(port)]
    process = ServerProcess(Launch(command, {}, key=KEY), f"http://127.0.0.1:{port}", tmp_path / "log")
    process.start()
    with closing(Stopped(process)):
        deadline = time.monotonic() + SOON
        while not process.is_healthy(5.0) and time.monotonic() < deadline:
            time.sleep(0.05)
        get(lambda session: Http(session, process.url, KEY, process.listens))
        assert "api_key='****************'" in process.log.read_text()
        assert process.pid is not None
        os.kill(process.pid, 9)
        while process.exit_status() is None:
            time.sleep(0.01)
        assert not process.listens()


def test_the_supervisor_names_the_process_that_has_its_servers_port(tmp_path: Path):
    with a_stranger() as (port, _):
        process = ServerProcess(Launch(["false"], {}), f"http://127.0.0.1:{port}", tmp_path / "log")
        supervisor = Supervisor([process], ServersConfig(restarts=0), lambda _: None)
        with closing(supervisor):
            supervisor.start()
            deadline = time.monotonic() + SOON
            while supervisor.failed is None and time.monotonic() < deadline:
                time.sleep(0.05)
    assert f"ended with status 1, and process {os.getpid()} (" in (supervisor.failed or "")


def test_a_redirect_takes_no_key_elsewhere():
    with a_stranger() as (other, requests):
        to = b"HTTP/1.0 307 Moved\r\nLocation: http://127.0.0.1:%d/health\r\n\r\n" % other
        with a_stranger(to) as (port, _):
            with pytest.raises(ServerRefused, match=r"/health: status 307: it redirects to another address"):
                get(lambda session: Http(session, f"http://127.0.0.1:{port}", KEY))
            assert not is_healthy(f"http://127.0.0.1:{port}", SOON)
        assert requests == []


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.0 200 OK\r\n\r\n" + b"9" * 10_000,
        b"HTTP/1.0 200 OK\r\nContent-Type: a/b; charset=nonsense\r\n\r\n\xff\xfe",
    ],
)
def test_an_answer_that_is_no_json_is_text(answer: bytes):
    with a_stranger(answer) as (port, _):
        get(lambda session: Http(session, f"http://127.0.0.1:{port}"))


def test_an_endless_answer_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_gvpo.servers.http.LONGEST", 1000)
    endless = a_stranger(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 2000)
    with endless as (port, _), pytest.raises(ServerGone, match=r"an answer of more than 1,000 bytes"):
        get(lambda session: Http(session, f"http://127.0.0.1:{port}"))
