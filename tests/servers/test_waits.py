"""A trainer's waits never keep back what they wait for, on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed import launch
from paths import HELPERS, IMPORTS
from safetensors.torch import load_file
from servers.real_servers import Client, SharedServer, running

from megatron_gvpo.servers import leader
from megatron_gvpo.servers.leader import Command, Done, Push, Wait
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.servers import ServersConfig, WeightSyncConfig
from megatron_gvpo.weights.broadcast import Broadcast
from megatron_gvpo.weights.group import WeightGroup
from megatron_gvpo.weights.publisher import Publisher
from megatron_gvpo.weights.receivers.sglang import SGLangBroadcast

TIMEOUT = 60.0  # seconds


on_sglang = pytest.mark.parametrize("served", ["sglang"], indirect=True)


@pytest.fixture
def client(served: SharedServer) -> Client:
    return served.client


def pushing(client: Client, task: Path, **settings: object) -> tuple[ServerPool, Publisher, list]:
    """A pool of the server, its publisher, and the tiny model's weights."""
    weights = list(load_file(task / "model" / "model.safetensors").items())
    pool = ServerPool([client.server], ServersConfig(start_timeout=TIMEOUT), [1], print)
    client.loop.run(pool.start())
    publisher = Publisher(
        pool,
        client.loop,
        Broadcast(SGLangBroadcast, "127.0.0.1", "gloo", TIMEOUT),
        WeightSyncConfig(bucket_mb=1, timeout=TIMEOUT, **settings),
        dtype=torch.float32,
        device=torch.device("cpu"),
        expected={name: tuple(tensor.shape) for name, tensor in weights},
        optional=frozenset(["lm_head.weight"]),
        fp8=None,
        colocated=False,
        report=print,
    )
    return pool, publisher, weights


def commanded(publisher: Publisher, version: int) -> list[Command]:
    """The publisher's commands up to the first that is not Wait."""
    commands = [publisher.next_command(version)]
    while commands[-1] == Wait():
        commands.append(publisher.next_command(version))
    return commands


class Waiting(WeightGroup):
    """A group that behaves like NCCL's first broadcast: the call returns when all ranks have joined it."""

    def connect(self, prefixes: Sequence[str]) -> None:
        super().connect(prefixes)
        group = self._group

        def broadcast(tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
            work = group.broadcast(tensors, options)
            work.wait()
            return work

        self._group = SimpleNamespace(broadcast=broadcast, abort=group.abort)


@on_sglang
def test_a_broadcast_that_waits_for_servers_does_not_keep_them_from_coming(
    client: Client, task: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megatron_gvpo.weights.broadcast.WeightGroup", Waiting)
    pool, publisher, weights = pushing(client, task)
    assert commanded(publisher, 8)[-1] == Push()
    publisher.attempt(weights, 8)
    assert commanded(publisher, 8) == [Done()] and pool.handles[0].has(8)
    assert client("weight_version") == "8"
    publisher.close()
    client.loop.run(pool.stop())


@on_sglang
def test_the_other_ranks_wait_on_the_cpu_while_responses_are_finished(
    client: Client, task: Path, monkeypatch: pytest.MonkeyPatch
):
    """A collective has a timeout, and in_flight=wait may take as long as a response does."""
    monkeypatch.setattr(leader, "HEARTBEAT", 0.1)
    pool, publisher, weights = pushing(client, task, in_flight="wait")
    assert commanded(publisher, 0)[-1] == Push()
    publisher.attempt(weights, 0)
    requests = [Request((5, 6, 7 + i), 4, seed=i) for i in range(8)]
    sampling = SamplingConfig(temperature=2.0, max_tokens=200)
    responses = client.loop.submit(pool.generate(requests, sampling))
    while not any(handle.calls for handle in pool.handles):
        assert not responses.done()
    assert commanded(publisher, 1)[-1] == Push()
    assert not any(handle.calls for handle in pool.handles)
    publisher.attempt(weights, 1)
    for row in responses.result(TIMEOUT):
        assert all(len(rollout.spans) == 1 and rollout.finish_reason != "abort" for rollout in row)
    publisher.close()
    client.loop.run(pool.stop())


@pytest.mark.proof
@on_sglang
def test_there_may_be_more_responses_than_open_files(client: Client):
    """Each response is a connection, and a cluster's step has more of them than a process may usually
    open.
    """
    program = HELPERS / "programs" / "few_files.py"
    command = [sys.executable, str(program), "sglang", client.server.url]
    environment = {**os.environ, "PYTHONPATH": IMPORTS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["400", "responses"]


@pytest.mark.proof  # test_faults.py kills a server while weights are pushed
def test_a_server_that_ends_before_a_push_is_proved_is_lost_and_comes_back(task: Path, tmp_path: Path):
    with running("sglang", task, tmp_path) as supervisor:
        [process] = supervisor.processes
        launch(
            "pushes.push_worker:ended", [1], "sglang", process.url, str(task), str(tmp_path), str(process.pid)
        )


def test_servers_may_take_longer_to_start_than_a_collective_waits(task: Path, tmp_path: Path):
    """A large model's weights take long to load: the ranks wait without a collective, and all get the
    error.
    """
    launch("pushes.push_worker:unopened", [2], str(task), str(tmp_path))
    for rank in range(2):
        assert (
            "not healthy after rollout.servers.start_timeout=15 s" in (tmp_path / f"error-{rank}").read_text()
        )
