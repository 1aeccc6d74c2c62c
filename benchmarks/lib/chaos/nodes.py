"""The rollout servers of chaos runs, on two nodes: `megatron-gvpo serve` runs on each, as on a cluster.

The second node is a mount namespace with shared memory of its own, so that a trainer's rank there has to
relay weights to its server (`rollout.weights.transport=shared`). A proxy before each server disturbs its
connections.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
from helpers.servers.proxy import Proxy
from helpers.servers.real_servers import another_node, engine_python

from lib.chaos.strikes import Server
from megatron_gvpo.core.launch import free_ports
from megatron_gvpo.servers.launch.supervise import is_healthy

ROOT = Path(__file__).parents[3]
START_SECONDS = 600.0


@contextmanager
def two_nodes(engine: str, task: Path, folder: Path) -> Iterator[tuple[list[Server], int]]:
    """Start a server on each node, behind a proxy; yield the servers and a process id of the second node."""
    with ExitStack() as opened:
        pid, inside = opened.enter_context(another_node())
        services = [
            _serve(engine, task, folder / f"node-{i}", prefix) for i, prefix in enumerate(("", inside))
        ]
        for service, _ in services:
            opened.callback(_end, service)
        for service, port in services:
            _wait(service, port, folder)
        links = [Proxy(f"http://127.0.0.1:{port}", *free_ports(1, "127.0.0.1")) for _, port in services]
        for link in links:
            opened.callback(link.close)
        leaders = [partial(_leader, *service) for service in services]
        yield [Server(leader, link) for leader, link in zip(leaders, links, strict=True)], pid


def _serve(engine: str, task: Path, folder: Path, prefix: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start `megatron-gvpo serve` of one server; return the process and the port.

    `prefix` enters the server's node.
    """
    folder.mkdir(parents=True)
    [port] = free_ports(1, "127.0.0.1")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {prefix} {engine_python(engine)} "$@"\n')
    python.chmod(0o755)
    command = [sys.executable, "-m", "megatron_gvpo", "serve", str(task / "run.yaml")]
    command += [f"output_dir={folder}", f"rollout.engine={engine}", f"rollout.servers.python={python}"]
    command += [f"rollout.servers.port={port}", "rollout.servers.context_length=256"]
    command += ["rollout.servers.restarts=1000", "rollout.servers.hang_timeout=60"]
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment["MEGATRON_GVPO_WEIGHTS"] = tempfile.gettempdir()  # which has the runs of all schedules
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment), port


def _wait(service: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(f"http://127.0.0.1:{port}", 5.0):
        if service.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a server is not healthy; see the logs under {folder}")
        time.sleep(1.0)


def _leader(service: subprocess.Popen[bytes], port: int) -> int | None:
    """Return the server's current process, the leader of its group; None while no process runs."""
    for child in psutil.Process(service.pid).children():
        with suppress(psutil.NoSuchProcess):
            if str(port) in child.cmdline():
                return child.pid
    return None


def _end(service: subprocess.Popen[bytes]) -> None:
    service.terminate()
    service.wait(60)
