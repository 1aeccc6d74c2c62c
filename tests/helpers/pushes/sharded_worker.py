"""Rank functions of trainers that push shards."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.inputs.rows import make_rows
from helpers.pushes.fair_shares import fair_shares
from helpers.pushes.push_worker import _compare, served_engine
from helpers.tiny_run import configure
from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.sampling.served import ServedEngine
from megatron_gvpo.settings.config import Config
from megatron_gvpo.weights.colocated import Colocated
from megatron_gvpo.weights.shard_plan import PushPlan
from megatron_gvpo.weights.sharded import Sharded

LAYOUTS = {
    "tp2": ("parallel.tp=2",),
    "tp2 pp2": ("parallel.tp=2", "parallel.pp=2"),
    "ep2 etp2 tp2": (
        "parallel.tp=2",
        "parallel.ep=2",
        "parallel.etp=2",
        "parallel.sequence_parallel=true",
    ),
    "ep2 tp2": ("parallel.tp=2", "parallel.ep=2", "parallel.sequence_parallel=true"),
}


def parts(task: str, out: str, layout: str) -> None:
    """Rank 0 writes the exported tensors, and the tensors that it assembles from all ranks' parts."""
    config = configure(Path(task), Path(out), "algorithm=grpo", "optimizer.lr=1.0e-2", *LAYOUTS[layout])
    policy = Policy.of(config)
    policy.own_weights()
    policy.update(make_rows([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]), at_step_start=True)
    own = policy.own_weights()
    exported = {name: tensor.clone() for name, tensor in policy.weights()}
    assembled = {name: torch.full((len(t), t.numel() // len(t)), torch.nan) for name, t in exported.items()}
    for part in own.parts:
        assembled[part.name][part.top : part.bottom, part.left : part.right] = own.read(part)
    for tensor in assembled.values():  # NaN marks the parts that other ranks have
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        for other in gathered:
            tensor.copy_(torch.where(tensor.isnan(), other, tensor))
    if dist.get_rank() == 0:
        torch.save(exported, Path(out) / "exported")
        torch.save(assembled, Path(out) / "assembled")


def push(engine: str, urls: str, task: str, out: str, layout: str, transport: str = "sharded") -> None:
    """Push before and after updates; write the servers' checksums, and those of the export from files."""
    config = _config(engine, urls, task, out, layout, transport)
    policy = Policy.of(config)
    with served_engine(config, policy) as rollouts:
        for step in range(3):
            if step:
                policy.update(make_rows([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]), at_step_start=True)
            rollouts.sync(step)
            policy.model.save_hf(Path(out) / f"export-{step}")
            if rollouts.servers is not None:
                _check_bytes(_transport(rollouts), rollouts.metrics)
                _compare_all(rollouts, Path(out), step)
            dist.barrier()


def killed(
    engine: str, urls: str, task: str, out: str, layout: str, pid: str, transport: str = "sharded"
) -> None:
    """Kill a server's processes in the middle of the second push. All servers get the third."""
    config = _config(engine, urls, task, out, layout, transport)
    policy = Policy.of(config)
    with served_engine(config, policy) as rollouts:
        rollouts.sync(0)
        if rollouts.servers is not None:
            _before_sending(_transport(rollouts), lambda: os.killpg(int(pid), signal.SIGKILL))
        policy.update(make_rows([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]), at_step_start=True)
        rollouts.sync(1)
        if rollouts.servers is not None:
            states = [(handle.is_lost, handle.has(1)) for handle in rollouts.servers.pool.handles]
            assert sorted(states) == [(False, True), (True, False)], states
        _wait_for_all(rollouts, config.rollout.servers.start_timeout)
        rollouts.sync(1)
        policy.model.save_hf(Path(out) / "export-1")
        if rollouts.servers is not None:
            assert all(handle.has(1) for handle in rollouts.servers.pool.handles)
            _compare_all(rollouts, Path(out), 1)
        dist.barrier()


def interrupted(engine: str, urls: str, task: str, out: str, layout: str, transport: str = "sharded") -> None:
    """Kill the trainer's ranks in the middle of their first push."""
    config = _config(engine, urls, task, out, layout, transport)
    policy = Policy.of(config)
    with served_engine(config, policy) as rollouts:
        if rollouts.servers is not None:
            connect = rollouts._weights.connect

            def connect_and_wait(servers: Any) -> None:
                connect(servers)
                _before_sending(_transport(rollouts), lambda: os.kill(os.getpid(), signal.SIGKILL))

            rollouts._weights.connect = connect_and_wait
        rollouts.sync(0)


def _config(engine: str, urls: str, task: str, out: str, layout: str, transport: str) -> Config:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    return configure(
        Path(task),
        Path(out),
        f"rollout.engine={engine}",
        f"rollout.servers.urls=[{urls}]",
        "algorithm=grpo",
        "optimizer.lr=1.0e-2",
        f"rollout.weights.transport={transport}",
        "rollout.weights.bucket_mb=1",
        "rollout.weights.timeout=60",
        *LAYOUTS[layout],
    )


def _transport(rollouts: ServedEngine) -> Sharded:
    transport = rollouts._weights._publisher._transport
    assert isinstance(transport, Sharded)
    return transport


def _check_bytes(transport: Sharded, metrics: dict[str, float]) -> None:
    """Assert that both ends of each link count the plan's bytes, and no rank sent more than its share."""
    plan = transport.plan
    assert plan is not None and transport.counted == plan.link_bytes()
    sent = plan.sent_bytes()
    if isinstance(transport, Colocated):
        _check_handed(transport, plan, metrics)
        return
    shares, bucket = fair_shares(plan, transport.layouts), 2**19
    for rank in range(plan.trainers):
        assert sent[rank] <= shares[rank] + bucket, (rank, sent[rank], shares[rank])
    trainer = sum(sent[rank] for rank in range(plan.trainers))
    assert trainer == metrics["sync/bytes"] and max(sent[r] for r in range(plan.trainers)) < 0.5 * trainer


def _check_handed(transport: Colocated, plan: PushPlan, metrics: dict[str, float]) -> None:
    """Assert that each server rank got its parts once, and no trainer rank held more beside its weights.

    The memory of its own porter counts as the trainer rank's.
    """
    sizes = [
        {
            (number, box): box.elements * plan.tables[number].itemsize
            for number, boxes in layout.items()
            for box in boxes
        }
        for layout in transport.layouts
    ]
    total = sum(table.rows * table.columns * table.itemsize for table in plan.tables)
    got: Counter[int] = Counter()
    for (_, target), size in transport.counted.items():
        got[target] += size
    crossed = 0
    for parcel in plan.parcels:
        porter = transport._porters[parcel.first - plan.trainers]
        holders = [
            rank
            for rank, layout in enumerate(transport.layouts)
            if any(box.contains(parcel.cell.box) for box in layout.get(parcel.cell.tensor, ()))
        ]
        assert (parcel.owner == porter) == (porter in holders), (parcel, porter, holders)
        crossed += parcel.nbytes * (parcel.owner != porter)
    assert sorted(transport._porters) == [0, 1, 2, 3] and not any(parcel.route for parcel in plan.parcels)
    most_got, most_held = max(got.values()), max(sum(sizes_of_rank.values()) for sizes_of_rank in sizes)
    assert most_got < 0.9 * total, (most_got, total)  # what its engine loads: half of the model and more
    assert most_held < 0.8 * total, (most_held, total)
    assert metrics["sync/most_sent"] < crossed, (metrics, crossed)  # several ranks send


def _before_sending(transport: Sharded, act: Any) -> None:
    """Call `act` once, when the servers receive and before rank 0 sends."""
    all_at_once = transport._all_at_once

    async def acting(own: Any) -> None:
        sender, transport._all_at_once = transport._sender, all_at_once
        send = sender.send

        def acting_send(weights: Any) -> None:
            act()
            send(weights)

        sender.send = acting_send
        await all_at_once(own)

    transport._all_at_once = acting


def _wait_for_all(rollouts: ServedEngine, seconds: float) -> None:
    """Wait on every rank until no server is lost. A server may take longer to start than a collective may."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        servers = rollouts.servers  # rank 0's
        if not broadcast_msgpack(servers is not None and any(h.is_lost for h in servers.pool.handles)):
            return
        time.sleep(0.5)
    raise AssertionError(f"a killed server did not come back in {seconds:g} s")


def _compare_all(rollouts: ServedEngine, out: Path, step: int) -> None:
    for i, handle in enumerate(rollouts.servers.pool.handles):
        (out / str(i)).mkdir(exist_ok=True)
        _compare(rollouts.servers, handle, out / f"export-{step}", out / str(i), step)
