"""Servers that span several machines: their commands, their life together, and real ones of two ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers.distributed import launch
from helpers.machine.processes import soon
from helpers.pushes.pushed import assert_exported
from helpers.servers.real_servers import ENGINES, served_config
from helpers.suite.real_parts import used

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.launch import free_ports
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers import session
from megatron_gvpo.servers.launch.server_guard import PART
from megatron_gvpo.servers.launch.start import DIALECTS, server_gpus, start_servers
from megatron_gvpo.servers.launch.supervise import RanksProcess, ServerProcess, Supervisor, is_healthy
from megatron_gvpo.servers.server import Launch
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.servers import ServersConfig

TWO = ("rollout.servers.tp=2", "rollout.servers.nodes=2")
SOON = 60.0  # seconds
ANSWERS = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def machine(node: int, port: int) -> tuple[str, ...]:
    """The overrides of a machine, whose address is its own on this one's loopback."""
    own = (f"rollout.servers.port={port}", f"rollout.servers.host=127.0.0.{1 + node}")
    return (
        *TWO,
        *own,
        *([f"rollout.servers.node={node}", "rollout.servers.leader=127.0.0.1"] if node else []),
    )


# --- commands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [0, 1])
def test_each_machine_gets_its_part_of_sglangs_command(node: int, task: Path, tmp_path: Path):
    config = served_config("sglang", task, tmp_path, *machine(node, 20_000))
    command = (
        DIALECTS["sglang"]
        .launch(config.model, config.rollout, ModelCards(config), 20_000, None, False)
        .command
    )
    at = command.index("--nnodes")
    assert command[at : at + 6] == [
        "--nnodes",
        "2",
        "--node-rank",
        str(node),
        "--dist-init-addr",
        "127.0.0.1:20002",
    ]
    assert command[command.index("--tp-size") + 1] == "2"


@pytest.mark.parametrize("node", [0, 1])
def test_each_machine_gets_its_part_of_vllms_command(node: int, task: Path, tmp_path: Path):
    config = served_config("vllm", task, tmp_path, *machine(node, 20_000))
    made = DIALECTS["vllm"].launch(config.model, config.rollout, ModelCards(config), 20_000, None, False)
    at = made.command.index("--nnodes")
    expected = [
        "--nnodes",
        "2",
        "--node-rank",
        str(node),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "20002",
    ]
    assert made.command[at : at + 8] == expected
    assert ("--headless" in made.command) == ("megatron_gvpo_follower" in made.command) == bool(node)
    assert made.environment["VLLM_HOST_IP"] == f"127.0.0.{1 + node}"


def test_a_machine_gives_its_share_of_the_gpus():
    servers = ServersConfig(tp=16, nodes=2, port=20_000)
    assert server_gpus(servers, 8, 0) == [range(8)]
    with pytest.raises(ConfigError, match=r"tp=16 / rollout.servers.nodes=2: 8 GPUs, and this machine has 4"):
        server_gpus(servers, 4, 0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tp=3", "nodes=2"], r"nodes=2: does not divide tp=3"),
        (["tp=2", "nodes=2", "count=2"], r"count=2: with nodes=2 a machine has a part of one server"),
        (["tp=2", "nodes=2", "node=2"], r"node=2: nodes=2 are numbered from 0 to 1"),
        (["tp=2", "nodes=2", "colocated=true"], r"colocated=true: servers on the trainer's own GPUs"),
        (["tp=2", "nodes=2", "port=65534"], r"meet at the two ports behind it"),
        (["node=1"], r"node and leader are of a server on several machines"),
    ],
)
def test_what_cannot_be_on_several_machines(overrides: list[str], words: str, good: Path):
    with pytest.raises(ConfigError, match=words):
        load_config([good], ["rollout.engine=sglang", *(f"rollout.servers.{word}" for word in overrides)])


def test_the_trainers_memory_is_not_on_several_machines(good: Path):
    with pytest.raises(ConfigError, match=r"transport=shared with rollout.servers.nodes=2"):
        load_config([good], ["rollout.engine=sglang", *TWO, "rollout.weights.transport=shared"])


def test_a_run_does_not_start_them_itself(task: Path, tmp_path: Path):
    config = served_config("sglang", task, tmp_path, *TWO)
    with pytest.raises(ConfigError, match=r"megatron-gvpo serve on each of theirs"):
        session._servers(config.model, config.rollout, config.output_dir, ModelCards(config))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), r"rollout.servers.port=0"),
        (("rollout.servers.port=20000", "rollout.servers.node=1"), r"leader is missing"),
    ],
)
def test_where_machines_meet_is_to_be_given(
    overrides: tuple[str, ...], words: str, task: Path, tmp_path: Path
):
    config = served_config("sglang", task, tmp_path, *TWO, *overrides)
    with pytest.raises(ConfigError, match=words):
        start_servers(config.model, config.rollout, config.output_dir, ModelCards(config), None, print)


# --- life ---------------------------------------------------------------------------------------------------


def part(node: int, port: int, directory: Path, key: str = "key") -> Supervisor:
    """A supervised part: machine 0 answers that it is healthy, the others sleep."""
    machine = {"node": node, "nodes": 3, "host": "127.0.0.1", "port": port + 1, "key": key}
    command = [sys.executable, "-c", ANSWERS, str(port)] if node == 0 else ["sleep", "1000"]
    made = (RanksProcess if node else ServerProcess)(
        Launch(command, {PART: json.dumps(machine)}), f"http://127.0.0.1:{port}", directory / f"{node}.log"
    )
    return Supervisor([made], ServersConfig(start_timeout=SOON, hang_timeout=SOON), lambda message: None)


def test_all_parts_of_a_server_start_end_and_start_again_together(tmp_path: Path):
    import psutil

    def works(supervisor: Supervisor) -> int | None:
        """The process of the part that the guard has started."""
        try:
            children = psutil.Process(supervisor.processes[0].pid).children()
        except psutil.Error:
            return None
        return children[0].pid if children else None

    [port] = free_ports(1, "127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as ended:
        parts = [part(node, port, tmp_path) for node in (2, 0)]
        for supervisor in parts:
            ended.callback(supervisor.close)
            supervisor.start()
        time.sleep(2.0)
        assert not any(map(works, parts)), "one machine is missing, so nothing starts"
        with socket.create_connection(("127.0.0.1", port + 1)) as stranger:
            stranger.recv(32)
            stranger.sendall(bytes(36))
            assert stranger.recv(2) == b"", "without the key nobody is a part"
        parts.append(part(1, port, tmp_path))
        ended.callback(parts[-1].close)
        parts[-1].start()
        for killed in range(3):
            # Only with its health is a start over: until then parts may start once more.
            assert soon(lambda: is_healthy(url, 1.0) and all(map(works, parts)))
            before = [works(supervisor) for supervisor in parts]
            os.kill(before[killed], signal.SIGKILL)
            assert soon(lambda: all(map(works, parts)) and not set(map(works, parts)) & set(before))  # noqa: B023
            assert soon(lambda: not any(map(psutil.pid_exists, before)))  # noqa: B023 (once they are reaped)
        assert all(supervisor.failed is None for supervisor in parts)


# --- real servers -------------------------------------------------------------------------------------------


@contextmanager
def on_two_machines(engine: str, task: Path, out: Path, *overrides: str) -> Iterator[list[Supervisor]]:
    """A healthy server of two ranks, each with a process of its own as if on two machines."""
    [port] = free_ports(1, "127.0.0.1")
    with ExitStack() as ended, pytest.MonkeyPatch.context() as environment:
        environment.setenv("MEGATRON_GVPO_WEIGHTS", str(out))
        parts = []
        for node in (1, 0):
            config = served_config(engine, task, out, *machine(node, port), *overrides)
            parts.insert(
                0,
                start_servers(
                    config.model, config.rollout, config.output_dir, ModelCards(config), None, print
                ),
            )
            ended.callback(parts[0].close)
        url = parts[0].processes[0].url
        logs = [supervisor.processes[0] for supervisor in parts]
        assert soon(lambda: is_healthy(url, 5.0), 900.0), "\n".join(each.tail() for each in logs)
        used(f"{engine} server")
        yield parts


@pytest.mark.proof
@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_on_two_machines_gets_what_was_exported(engine: str, task: Path, tmp_path: Path):
    """Its tensors, greedy tokens and log-probs are those of transformers on the export, push after push.

    So they are those of a server on one machine (test_engines.py). A push in shards sends the plan's bytes.
    A killed machine ends the server, and all of it is back for the next push.
    """
    with on_two_machines(engine, task, tmp_path) as parts:
        url = parts[0].processes[0].url
        launch("helpers.pushes.push_worker:run", [1], engine, url, str(task), str(tmp_path), "single")
        assert_exported(tmp_path)
        before = [supervisor.processes[0].pid for supervisor in parts]
        follower = parts[1].processes[0].pid
        assert follower is not None
        os.killpg(follower, signal.SIGKILL)
        assert soon(lambda: not is_healthy(url, 1.0))
        assert soon(lambda: is_healthy(url, 5.0), 900.0), parts[0].processes[0].tail()
        assert not {supervisor.processes[0].pid for supervisor in parts} & set(before)
        sharded = tmp_path / "sharded"
        sharded.mkdir()
        launch("helpers.pushes.sharded_worker:push", [4], engine, url, str(task), str(sharded), "tp2 pp2")
        for step in range(3):
            pushed, loaded = (sharded / "0" / f"checksum-{step}{end}" for end in ("", "-from-files"))
            assert pushed.read_text() == loaded.read_text()
