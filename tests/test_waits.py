"""A real server, and a trainer whose waits must not keep what they wait for from coming."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import launch
from servers import Client, running


@pytest.fixture(scope="module")
def client(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with running("sglang", task, tmp_path_factory.mktemp("sglang")) as supervisor:
        client = Client("sglang", supervisor.processes[0].url)
        yield client
        client.close()


def test_there_may_be_more_responses_than_open_files(client: Client):
    """Each is a connection: a step of a cluster has more of them than a process may usually open."""
    worker = Path(__file__).with_name("few_files.py")
    command = [sys.executable, str(worker), "sglang", client.server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["400", "responses"]


def test_servers_may_take_longer_to_start_than_a_collective_waits(task: Path, tmp_path: Path):
    """The weights of a large model take long to load: the ranks hear of it, and all get the error."""
    launch("push_worker:unopened", [2], str(task), str(tmp_path))
    for rank in range(2):
        assert (
            "not healthy after rollout.servers.start_timeout=15 s" in (tmp_path / f"error-{rank}").read_text()
        )
