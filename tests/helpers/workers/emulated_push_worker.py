"""Rank function of test_emulated_pushes.py: a trainer on emulated GPUs pushes to a server there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from helpers.distributed import run_number
from helpers.workers.gradient_worker import config_of
from megatron_gvpo.megatron.model.own_weights import OwnWeights
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerRefused
from megatron_gvpo.servers.server import ServerInfo
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.colocated import Colocated
from megatron_gvpo.weights.publisher import Weights
from megatron_gvpo.weights.receivers.sglang import PluginReceiver, SGLangSharded, SGLangShared
from megatron_gvpo.weights.sharded import Sharded
from megatron_gvpo.weights.shared import Shared
from megatron_gvpo.weights.transport import PushSettings

RANKS = 2  # of the server
PUSHES = 2
BUCKET_MB = 1
# Both classes of a transport; its orders go to the server's ranks by pipes in place of HTTP.
TRANSPORTS: dict[str, tuple[Any, type[PluginReceiver]]] = {
    "shared": (Shared, SGLangShared),
    "sharded": (Sharded, SGLangSharded),
    "colocated": (Colocated, SGLangSharded),
}


class Served:
    """A server: its ranks are processes, each with an emulated GPU of the trainer's."""

    url = "http://emulated"

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        file = folder / "shapes.json"
        file.write_text(json.dumps(shapes))
        command = [sys.executable, "-W", "ignore", "-m", "helpers.workers.emulated_engine", str(file)]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._ranks = [
            subprocess.Popen([*command, str(rank), str(RANKS)], stdin=-1, stdout=-1, env=variables)
            for rank in range(RANKS)
        ]
        self._turn = asyncio.Lock()
        self.http = SimpleNamespace(post=self._nothing)

    async def info(self, timeout: float) -> ServerInfo:
        return ServerInfo("0", "model", 256, RANKS)

    async def _nothing(self, *arguments: Any, **options: Any) -> None:
        """An engine's own calls around a push."""

    async def order(self, orders: Sequence[dict[str, Any]]) -> None:
        async with self._turn:
            for rank, order in zip(self._ranks, orders, strict=True):
                assert rank.stdin is not None
                rank.stdin.write(json.dumps(order).encode() + b"\n")
                rank.stdin.flush()
            problems = await asyncio.gather(*(asyncio.to_thread(_answer, rank) for rank in self._ranks))
        if any(problems):
            raise ServerRefused(f"{self.url}: {problems}", 500)

    async def save(self, folder: Path, version: int) -> None:
        """Each rank writes its weights to a file."""
        files = [str(folder / f"served-{version}-{rank}") for rank in range(RANKS)]
        await self.order([{"op": "save", "file": file} for file in files])

    def close(self) -> None:
        for rank in self._ranks:
            rank.communicate(timeout=60)


def _answer(rank: subprocess.Popen[bytes]) -> str:
    assert rank.stdout is not None
    return str(json.loads(rank.stdout.readline()))


def run(directory: str) -> None:
    """Push twice, with other weights the second time.

    Rank 0 writes to a folder the policy's weights, those of each rank of the server, and the push's metrics.
    """
    folder = Path(directory)
    layout, name, case = torch.load(folder / "work.pt", weights_only=False)[run_number()]
    config = config_of(case, layout, folder)
    weights = config.rollout.weights.model_copy(update={"bucket_mb": BUCKET_MB})
    rollout = config.rollout.model_copy(update={"weights": weights})
    device = torch.device("cuda", dist.get_rank())
    cards: Any = None  # these transports do not read them
    settings = PushSettings(rollout, config.model, cards, folder, device)
    policy = Policy.of(config)
    if dist.get_rank():
        _follow(name, settings, policy)
    else:
        _lead(name, settings, policy, folder / f"{layout}-{name}")


def _follow(name: str, settings: PushSettings, policy: Policy) -> None:
    follower = TRANSPORTS[name][0].follower(settings)
    for _ in range(PUSHES):
        list(policy.weights(on_host=True))
        stream = _stream(name, policy)
        if isinstance(stream, OwnWeights):
            follower.follow_own(stream)
        else:
            halves = DoubleBuffer(settings.rollout.weights.bucket_bytes, settings.device)
            follower.follow(buckets(stream, halves, torch.float32))
            list(stream)
        _change(policy)
    follower.close()


def _lead(name: str, settings: PushSettings, policy: Policy, out: Path) -> None:
    kind, receiver_kind = TRANSPORTS[name]

    class ByPipe(receiver_kind):  # type: ignore[misc, valid-type]
        async def order(self, orders: Sequence[dict[str, Any]], timeout: float) -> None:
            await self._server.order(orders)

    out.mkdir()
    transport, server, loop = kind.create(settings, ByPipe), None, asyncio.new_event_loop()
    for version in range(PUSHES):
        expected = {key: tensor.clone() for key, tensor in policy.weights(on_host=True)}
        save_file(expected, out / f"policy-{version}")
        shapes = {key: tuple(tensor.shape) for key, tensor in expected.items()}
        if server is None:
            server = Served(out, shapes)
            handle: Any = ServerHandle(server)  # type: ignore[arg-type]
        stream = _stream(name, policy)
        loop.run_until_complete(transport.begin([handle], version))
        if isinstance(stream, OwnWeights):
            loop.run_until_complete(transport.send_own(stream, shapes, frozenset()))
        else:
            halves = DoubleBuffer(settings.rollout.weights.bucket_bytes, settings.device)
            for bucket in buckets(stream, halves, torch.float32):
                loop.run_until_complete(transport.send(bucket))
        loop.run_until_complete(transport.end())
        transport.over()
        loop.run_until_complete(server.save(out, version))
        (out / f"metrics-{version}.json").write_text(json.dumps(transport.metrics))
        _change(policy)
    assert server is not None
    loop.run_until_complete(transport.close())
    server.close()


def _stream(name: str, policy: Policy) -> Weights:
    """The weights as the transport sends them; a collective."""
    return policy.weights(on_host=False) if name == "shared" else policy.own_weights()


def _change(policy: Policy) -> None:
    """Other weights, as after an update."""
    with torch.no_grad():
        for weight in policy.model.weights():
            weight.mul_(1.25)
