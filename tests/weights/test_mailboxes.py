"""Colocated pushes without a server: the porters' sends, the mailboxes, and what a failure leaves."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from weights.test_sharded import FULL, Engine, Ranks, own_parts

from megatron_gvpo.core import store as shared_store
from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.weights import node
from megatron_gvpo.weights.colocated import Mailbox, Porter, Seat, porters
from megatron_gvpo.weights.group import Membership
from megatron_gvpo.weights.node import NodeMemory
from megatron_gvpo.weights.shard_plan import Box, Table, plan_push
from megatron_gvpo.weights.sharded import STOP, Stopped

sys.path.insert(0, str(PLUGINS))

import megatron_gvpo_mailbox
from megatron_gvpo_shards import Shards

CPU = torch.device("cpu")
SERVERS = (2, 3, 4, 5)


class PorterRanks(Ranks):
    """Two trainer ranks, and two servers of two ranks, each a thread. The trainer's ranks have a group."""

    def __init__(self, memory: NodeMemory, timeout: float = 60.0) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.models = [Engine(rank % 2) for rank in range(4)]
        self.senders: list[Porter] = []
        self.errors: dict[int, BaseException] = {}
        made: dict[int, Membership] = {}

        def meet(rank: int) -> None:
            store = dist.TCPStore("127.0.0.1", self.store.port, is_master=False)
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout))
            made[rank] = Membership(store, group, rank, "gloo")

        self.together({rank: lambda rank=rank: meet(rank) for rank in range(2)})
        for rank in range(2):
            self.senders.append(Porter(made.pop(rank), torch.float32, timeout, self.has_stopped, memory))
        self.shards = [
            Shards(
                None,
                dist.TCPStore("127.0.0.1", self.store.port, is_master=False),
                rank,
                CPU,
                str(memory.directory),
                timeout,
            )
            for rank in SERVERS
        ]

    def has_stopped(self) -> bool:
        return self.store.check([STOP])

    def close(self, rank: int) -> None: ...

    def prepare(self, porters_of: list[int], nodes: tuple[int, int], limit: int = 40) -> None:
        """Plan with the porter of each server rank, and the machines of the trainer's two ranks."""
        tables, layouts, needed = self.layouts(FULL)
        seats = [(rank, nodes[rank]) for rank in [0, 1, *porters_of]]
        self.plan = plan_push(tables, layouts, needed, limit, seats)
        for rank, part in self.plan.parts().items():
            self.store.set(f"plan.{rank}", part.packed())
        self.store.set("porters", json.dumps(porters_of))


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeMemory]:
    """A run's directory of shared memory."""
    monkeypatch.setattr(shared_store, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("MEGATRON_GVPO_MEMORY", str(tmp_path))
    memory = NodeMemory(node.new_name(), CPU)
    yield memory
    memory.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("porters_of", [[0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
@pytest.mark.parametrize("limit", [40, 10**6])
def test_every_server_rank_is_handed_its_slices_over_and_over(
    memory: NodeMemory, porters_of: list[int], limit: int
):
    """Whoever its porter is: one that has all, some or none of what it needs."""
    ranks = PorterRanks(memory)
    ranks.prepare(porters_of, (0, 0), limit)
    keys = set[int]()  # in the store, after each push
    for step in range(3):
        full = {name: tensor + step for name, tensor in FULL.items()}
        ranks.push(full)
        assert not ranks.errors, ranks.errors
        keys.add(ranks.store.num_keys())
        for model in ranks.models:
            for name, tensor in model.expected(full).items():
                assert torch.equal(getattr(model, name), tensor), name
    assert len(keys) == 1, "a push leaves nothing more in the store than the one before"
    links: dict[tuple[int, int], int] = {}
    for rank in range(6):
        for link, size in json.loads(ranks.store.get(f"counted.{rank}")).items():
            assert links.setdefault(tuple(map(int, link.split("-"))), size) == size, (
                "both ends count the same"
            )
    assert links == dict(ranks.plan.link_bytes())
    half = sum(FULL[name].nbytes for name in FULL if name not in ("norm", "ignored")) // 2
    for rank in SERVERS:
        assert (
            sum(size for (_, target), size in links.items() if target == rank) == half + FULL["norm"].nbytes
        )
    crossed = sum(size for (source, target), size in links.items() if porters_of[target - 2] != source)
    # A porter has what its server rank needs if it is the same half; otherwise it has the norm alone.
    others = sum(porter != rank % 2 for porter, rank in zip(porters_of, SERVERS, strict=True))
    assert crossed == others * half
    for rank, model in zip(SERVERS, ranks.models, strict=True):
        rounds = sum(bool(messages) for messages in ranks.plan.parts()[rank].receives)
        assert len(model.calls) <= 3 * rounds, "one load a round at most"


def test_what_a_machine_holds_comes_from_there():
    """Four ranks hold the same on two machines; two more have what both machines lack."""
    table, other = Table("w", 8, 4, 2), Table("o", 8, 4, 2)
    all_rows = Box(0, 8, 0, 4)
    sources = [{0: [all_rows]}] * 4 + [{1: [all_rows]}] * 2
    seats = [
        (0, 0),
        (1, 0),
        (2, 2),
        (3, 2),
        (4, 4),
        (5, 4),
        *((porter, node) for porter, node in ((0, 0), (3, 2))),
    ]
    plan = plan_push(
        [table, other],
        sources,
        [[{0: [all_rows], 1: [all_rows]}], [{0: [all_rows], 1: [all_rows]}]],
        16,
        seats,
    )
    owners = {(parcel.cell.tensor, parcel.first): set() for parcel in plan.parcels}
    for parcel in plan.parcels:
        owners[parcel.cell.tensor, parcel.first].add(parcel.owner)
        assert not parcel.route, "servers pass nothing on"
    assert owners[0, 6] == {0} and owners[0, 7] == {3}, "the porters'"
    assert owners[1, 6] | owners[1, 7] == {4, 5}, "both share what only they have"
    elsewhere = [*seats[:6], (1, 0), (1, 0)]
    halves = [{0: [Box(0, 4, 0, 4)]}, {0: [Box(4, 8, 0, 4)]}, {0: [all_rows]}, {0: [all_rows]}, *sources[4:]]
    plan = plan_push([table], halves, [[{0: [all_rows]}], [{0: [all_rows]}]], 16, elsewhere)
    assert {parcel.owner for parcel in plan.parcels} == {0, 1}, "not those of another machine"


def test_a_loader_that_fails_ends_the_push_of_all_and_is_reported(memory: NodeMemory):
    ranks = PorterRanks(memory)
    ranks.prepare([0, 1, 0, 1], (0, 0))

    def failing(weights: object) -> None:
        raise ValueError("no such parameter")

    ranks.models[1].load_weights = failing  # type: ignore[method-assign]
    # Rank 0 of a run sets it, when a rank of the trainer has heard of the failure.
    stop = threading.Timer(2.0, lambda: ranks.store.set(STOP, "1"))
    stop.start()
    ranks.push(FULL)
    stop.join()
    assert ranks.store.get("failed.3") == b"ValueError: no such parameter"
    assert isinstance(ranks.errors[1], Stopped), "the porter of the server rank that failed"
    assert {1, 3} <= set(ranks.errors) and str(ranks.errors[3]) == "no such parameter"


def test_waits_are_named_and_end(memory: NodeMemory, tmp_path: Path):
    ranks = PorterRanks(memory, timeout=0.5)
    ranks.prepare([0, 0, 0, 0], (0, 0))
    ranks.together(
        {
            0: lambda: ranks.senders[0].send(own_parts(0, FULL)),
            1: lambda: ranks.senders[1].send(own_parts(1, FULL)),
        }
    )
    assert "rank 0 of the servers, to load a round, took over 0.5 s" in str(ranks.errors[0])
    ranks.errors.clear()
    with pytest.raises(RuntimeError, match=r"the trainer's rank has put in no round 2 for 0\.5 s"):
        ranks.shards[0].receive(ranks.models[0].load_weights)
    mailbox = Mailbox(memory.directory / "bucket.9", 8, CPU)
    server_end = megatron_gvpo_mailbox.Inbox(json.loads(json.dumps(mailbox.open())), 0)
    with pytest.raises(RuntimeError, match="the push has failed at another rank"):
        server_end.wait(0, 60.0, lambda: True)
    with pytest.raises(PermissionError, match="runs' directories"):
        megatron_gvpo_mailbox.seat(str(tmp_path.parent), CPU)


def test_a_mailbox_keeps_a_round_until_it_is_taken(memory: NodeMemory):
    mailbox = Mailbox(memory.directory / "bucket.9", 4, CPU)
    server_end = megatron_gvpo_mailbox.Inbox(mailbox.open(), 0)
    for number in range(5):
        assert mailbox.has_room()
        mailbox.room()[:] = number
        mailbox.put()
        assert mailbox.has_room() == (number == 0)
        if number:
            assert server_end.wait(number - 1, 5.0, lambda: False).tolist() == [number - 1] * 4
            server_end.took(number - 1, is_last=False)
    assert not mailbox.is_empty()
    server_end.took(4, is_last=True)
    assert mailbox.is_empty()


def test_a_server_rank_has_the_porter_on_its_gpu_or_its_machine():
    gpus = [Seat(0, "a"), Seat(0, "b"), Seat(2, "c"), Seat(2, "d")]
    assert porters(gpus, [Seat(2, "d"), Seat(0, "a"), Seat(0, "e"), Seat(None, "a")]) == [3, 0, None, None]
    cpus = [Seat(0, ""), Seat(0, ""), Seat(2, "")]
    assert porters(cpus, [Seat(0, ""), Seat(2, ""), Seat(0, ""), Seat(2, ""), Seat(0, "")]) == [0, 2, 1, 2, 0]
    assert porters(cpus, [Seat(None, "")]) == [None]


def test_ranks_of_a_machine_agree_on_its_first(memory: NodeMemory, tmp_path: Path):
    others = NodeMemory(memory.directory.name, CPU)
    assert [memory.first_rank(5), others.first_rank(2)] == [5, 5]
    assert megatron_gvpo_mailbox.seat(str(memory.directory), CPU) == {"node": 5, "gpu": ""}
    elsewhere = tmp_path / node.new_name()
    assert megatron_gvpo_mailbox.seat(str(elsewhere), CPU) == {"node": None, "gpu": ""}
