"""Rank function of test_emulated_pushes.py: a trainer on emulated GPUs pushes to a server there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from helpers.distributed import run_number
from helpers.workers.gradient_worker import Layout, config_of
from megatron_gvpo.megatron.model.own_weights import OwnWeights
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerRefused
from megatron_gvpo.servers.server import ServerInfo
from megatron_gvpo.settings.transports import TRANSPORTS
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.publisher import Weights
from megatron_gvpo.weights.receivers import receiver_class
from megatron_gvpo.weights.transport import PushSettings, transport_class

RANKS = 2  # the server's ranks
PUSHES = 2
BUCKET_MB = 1


@dataclass(frozen=True)
class Push:
    """One model under one layout, the engine that gets its weights, and the transport."""

    layout: Layout
    engine: str
    transport: str
    model: str  # a key of helpers.cases.gradient_cases.STEPS

    def __str__(self) -> str:
        return f"{self.engine} {self.transport}, {self.layout}"


class Served:
    """A server whose ranks are processes, each on one of the trainer's emulated GPUs."""

    url = "http://emulated"

    def __init__(self, folder: Path, engine: str, site: str, shapes: dict[str, tuple[int, ...]]) -> None:
        file, meet = folder / "server.json", str(folder / "meet")
        file.write_text(json.dumps({"engine": engine, "site": site, "shapes": shapes, "meet": meet}))
        command = [sys.executable, "-W", "ignore", "-m", "helpers.workers.emulated_engine", str(file)]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._ranks = [
            subprocess.Popen([*command, str(rank), str(RANKS)], stdin=-1, stdout=-1, env=variables)
            for rank in range(RANKS)
        ]
        self._turn = asyncio.Lock()
        self.http = self

    async def info(self, timeout: float) -> ServerInfo:
        return ServerInfo("0", "model", 256, RANKS)

    async def post(self, path: str, body: Any = None, *, timeout: float = 60.0) -> None:
        """Let each rank carry out the request, as an engine's scheduler does with its workers."""
        async with self._turn:
            for rank in self._ranks:
                assert rank.stdin is not None
                rank.stdin.write(json.dumps({"path": path, "body": body}).encode() + b"\n")
                rank.stdin.flush()
            problems = await asyncio.gather(*(asyncio.to_thread(_answer, rank) for rank in self._ranks))
        if any(problems):
            raise ServerRefused(f"{self.url}: {problems}", 500)

    async def save(self, folder: Path, version: int) -> None:
        """Let each rank write its weights to a file."""
        await self.post("save", str(folder / f"served-{version}"))

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
    push, site, case = torch.load(folder / "work.pt", weights_only=False)[run_number()]
    config = config_of(case, push.layout, folder)
    weights = config.rollout.weights.model_copy(update={"bucket_mb": BUCKET_MB})
    rollout = config.rollout.model_copy(update={"weights": weights})
    device = torch.device("cuda", dist.get_rank())
    cards: Any = None  # these transports do not read models' cards
    settings = PushSettings(rollout, config.model, cards, folder, device)
    policy = Policy.of(config)
    if dist.get_rank():
        _follow(push.transport, settings, policy)
    else:
        _lead(push, site, settings, policy, folder / str(push))


def _follow(transport: str, settings: PushSettings, policy: Policy) -> None:
    follower = transport_class(transport).follower(settings)
    for _ in range(PUSHES):
        list(policy.weights(on_host=True))
        stream = _stream(transport, policy)
        if isinstance(stream, OwnWeights):
            assert follower is not None
            follower.follow_own(stream)
        elif follower is not None:
            halves = DoubleBuffer(settings.rollout.weights.bucket_bytes, settings.device)
            follower.follow(buckets(stream, halves, torch.float32))
        if not isinstance(stream, OwnWeights):
            list(stream)
        _change(policy, transport)
    if follower is not None:
        follower.close()


def _lead(push: Push, site: str, settings: PushSettings, policy: Policy, out: Path) -> None:
    receiver = receiver_class(push.engine, push.transport)
    out.mkdir()
    transport = transport_class(push.transport).create(settings, receiver)
    server, loop = None, asyncio.new_event_loop()
    for version in range(PUSHES):
        expected = {key: tensor.clone() for key, tensor in policy.weights(on_host=True)}
        save_file(expected, out / f"policy-{version}")
        shapes = {key: tuple(tensor.shape) for key, tensor in expected.items()}
        if server is None:
            server = Served(out, push.engine, site, shapes)
            handle: Any = ServerHandle(server)  # type: ignore[arg-type]
        stream = _stream(push.transport, policy)
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
        handle.version = version
        (out / f"metrics-{version}.json").write_text(json.dumps(transport.metrics))
        _change(policy, push.transport)
    assert server is not None
    loop.run_until_complete(transport.close())
    server.close()


def _stream(transport: str, policy: Policy) -> Weights:
    """The weights as the transport sends them; a collective."""
    sends_own = TRANSPORTS[transport].sends_own
    return policy.own_weights() if sends_own else policy.weights(on_host=False)


def _change(policy: Policy, transport: str) -> None:
    """Change the weights, as an update does; for patches, a few elements of each."""
    step = 7 if transport == "delta" else 1
    with torch.no_grad():
        for weight in policy.model.weights():
            weight.view(-1)[::step] *= 1.25
