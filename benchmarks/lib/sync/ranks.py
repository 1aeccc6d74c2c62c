"""Measures seconds of a push against the trainer's ranks: by shards, and by broadcasts.

    python benchmarks/weight_sync.py --ranks 1 2 4

Every rank is a process on this machine, over gloo; two servers of two ranks each take the weights, without an
engine. The trainer's ranks hold equal parts of every tensor by rows, and the servers' ranks by columns.

  sharded    each trainer rank sends its parts, each server rank gets its own parts, and passes them on
  broadcast  every trainer rank gets all tensors (an all-gather, as the weight stream does), and the first one
             broadcasts them to every server rank
  plain      that broadcast alone, of bytes that the first rank has

Each time is the slowest rank's, from a barrier to the next, the median of `--rounds`. `most_sent` is the
bytes that the busiest trainer rank sends: those of the plan, or for a broadcast all bytes, although its tree
sends them more than once. All ranks share this machine's cores and memory, so the seconds do not apply to
larger machines; the bytes do.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_gvpo.megatron.model.own_weights import OwnPart, OwnWeights
from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.weights.group import Membership
from megatron_gvpo.weights.shard_plan import Box, Table, plan_push
from megatron_gvpo.weights.sharded import Sender

SERVERS, SERVER_RANKS = 2, 2
ROWS, COLUMNS = 4096, 2048  # of each tensor: 16 MiB in bf16
BUCKET = 2**25


def measure_ranks(trainers: int, megabytes: int, rounds: int) -> dict[str, Any]:
    """Measure the pushes from this many ranks; returns one row of the report."""
    tensors = max(1, round(megabytes * 1e6 / (2 * ROWS * COLUMNS)))
    world = trainers + SERVERS * SERVER_RANKS
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(
        _rank, (store.port, trainers, world, tensors, rounds), nprocs=world, start_method="fork"
    )
    size = tensors * ROWS * COLUMNS * 2
    row: dict[str, Any] = {"trainer_ranks": trainers, "servers": f"{SERVERS} x {SERVER_RANKS}"}
    row |= {"megabytes": size / 1e6, "load": os.getloadavg()[0]}
    return row | json.loads(store.get("row"))


def _rank(rank: int, port: int, trainers: int, world: int, tensors: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    soon = timedelta(seconds=300)
    dist.init_process_group("gloo", store=dist.PrefixStore("all", store), rank=rank, world_size=world)
    group = dist.ProcessGroupGloo(dist.PrefixStore("push", store), rank, world, soon)
    of_trainer = dist.new_group(list(range(trainers)))
    names = [f"w{i}" for i in range(tensors)]
    tables = [Table(name, ROWS, COLUMNS, 2) for name in names]
    part, step = ROWS // trainers, COLUMNS // SERVER_RANKS
    sources = [
        {i: [Box(part * r, part * (r + 1), 0, COLUMNS)] for i in range(tensors)} for r in range(trainers)
    ]
    one = [{i: [Box(0, ROWS, step * r, step * (r + 1))] for i in range(tensors)} for r in range(SERVER_RANKS)]
    plan = plan_push(tables, sources, [one] * SERVERS, BUCKET)
    if rank == 0:
        listed = [(name, "bfloat16", (ROWS, COLUMNS)) for name in names]
        packed: Any = zlib.compress(json.dumps(listed).encode())
        store.set("tables", packed)
        for other, part_plan in plan.parts().items():
            packed = part_plan.packed()
            store.set(f"plan.{other}", packed)
    dist.barrier()
    push = (
        _sender(store, group, rank, tensors, part)
        if rank < trainers
        else _receiver(store, group, rank, rank - trainers)
    )
    filled = [torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16) for _ in range(tensors)]
    parts = [t[part * rank : part * (rank + 1)].contiguous() for t in filled] if rank < trainers else []

    def plain() -> None:
        for tensor in filled:
            if rank == 0 or rank >= trainers:
                group_of_broadcast.broadcast([tensor], dist.BroadcastOptions()).wait()

    def old() -> None:
        for tensor, own in zip(filled, parts, strict=False):
            dist.all_gather_into_tensor(tensor, own, group=of_trainer)
        plain()

    receivers = [0, *range(trainers, world)]
    group_of_broadcast: Any = None
    if rank in receivers:
        number = receivers.index(rank)
        group_of_broadcast = dist.ProcessGroupGloo(dist.PrefixStore("b", store), number, len(receivers), soon)
    timed = {"sharded": push, "broadcast": old, "plain": plain}
    spent: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds + 1):
        for name, act in timed.items():
            spent[name].append(_seconds(act))
    if rank == 0:
        sent = plan.sent_bytes()
        row: dict[str, Any] = {f"{name}_s": round(median(times[1:]), 4) for name, times in spent.items()}
        row["most_sent_mb"] = {
            "sharded": max(sent[r] for r in range(trainers)) / 1e6,
            "broadcast": tensors * ROWS * COLUMNS * 2 / 1e6,
        }
        row["server_rank_gets_mb"] = {
            "sharded": tensors * ROWS * step * 2 / 1e6,
            "broadcast": tensors * ROWS * COLUMNS * 2 / 1e6,
        }
        store.set("row", json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(act: Callable[[], None]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begin


def _sender(store: Any, group: Any, rank: int, tensors: int, part: int) -> Callable[[], None]:
    own = OwnWeights(
        [torch.ones(part, COLUMNS, dtype=torch.bfloat16) for _ in range(tensors)],
        [OwnPart(f"w{i}", part * rank, part * (rank + 1), 0, COLUMNS, i, 0, COLUMNS) for i in range(tensors)],
    )
    sender = Sender(Membership(store, group, rank, "gloo"), torch.bfloat16, 300.0, lambda: False)
    return lambda: sender.send(own)


def _receiver(store: Any, group: Any, rank: int, number: int) -> Callable[[], None]:
    """A server's rank, with a loader that copies its columns of every tensor."""
    sys.path.insert(0, str(PLUGINS))
    from megatron_gvpo_shards import Shards

    step = COLUMNS // SERVER_RANKS
    first = step * (number % SERVER_RANKS)
    target = torch.empty(ROWS, step, dtype=torch.bfloat16)

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            target.copy_(tensor[:, first : first + step])

    shards = Shards(group, store, rank, torch.device("cpu"))
    shards.read_layout(load)
    return lambda: shards.receive(load)
