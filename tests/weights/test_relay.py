"""Relays carry out the orders of rank 0: here in threads, over a store."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
import torch
from helpers.servers.fake_servers import itself
from torch.distributed import HashStore, TCPStore

from megatron_gvpo.core import store as shared_store
from megatron_gvpo.servers.handle import Pending, ServerHandle
from megatron_gvpo.servers.http import ServerGone
from megatron_gvpo.servers.leader import BackgroundLoop, Done, Push
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.server import ServerInfo
from megatron_gvpo.settings.servers import ServersConfig, WeightSyncConfig
from megatron_gvpo.weights import node, sharded
from megatron_gvpo.weights.bucket import Bucket, TensorSpec
from megatron_gvpo.weights.node import NodeMemory
from megatron_gvpo.weights.publisher import Publisher
from megatron_gvpo.weights.relay import (
    ANSWERS,
    ORDERS,
    Discover,
    EndPush,
    JoinStream,
    Relay,
    Relays,
    ShareBucket,
)
from megatron_gvpo.weights.sharded import Send
from megatron_gvpo.weights.shared import Shared, SharedLocation
from megatron_gvpo.weights.transport import PushFailed

OFFER, NOTHING = ShareBucket(handles=0, file=True), ShareBucket(handles=0, file=False)
CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds for an answer of a thread; nothing here takes one


def stream(count: int) -> Iterator[Bucket]:
    """`count` buckets of growing sizes; all bytes of bucket i are i."""
    for i in range(count):
        flat = torch.full((4 + i,), i, dtype=torch.uint8)
        yield Bucket([TensorSpec("weight", "uint8", (4 + i,))], flat)


@contextmanager
def relays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: list[int]) -> Iterator[tuple]:
    """Rank 0's side and the relays on `ranks`, each with its own node's shared memory."""
    store, others = HashStore(), []
    for rank in ranks:
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setattr(shared_store, "SHARED_MEMORY", tmp_path / str(rank))
        others.append(Relay(store, rank, NodeMemory("memory", CPU), PATIENCE))
    yield Relays(store, ranks, PATIENCE, ORDERS), others
    for other in others:
        other._memory.close()
    assert not list(tmp_path.glob("*/*"))


@contextmanager
def following(others: list[Relay], streams: list[Iterator[Bucket]]) -> Iterator[None]:
    threads = [
        threading.Thread(target=o.follow, args=(s,), daemon=True)
        for o, s in zip(others, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a relay did not hear that the push was over"


def test_two_pushes_to_two_other_nodes(tmp_path, monkeypatch):
    with relays(tmp_path, monkeypatch, [8, 16]) as (rank_0, others):
        for push in range(2):
            with following(others, [stream(3), stream(3)]):
                (tmp_path / "16" / "memory" / f"{push}.told.123").write_text('["gpu"]')
                answers = rank_0.ask([Discover()] * 2, "to look")
                assert answers == [{"told": {}, "gpu": ""}, {"told": {str(push): [["gpu"]]}, "gpu": ""}]
                rank_0.tell(JoinStream())
                for i in range(3):
                    nothing, offer = rank_0.ask([NOTHING, OFFER], "to offer")
                    assert nothing == {"handles": [], "file": ""}
                    file = Path(offer["file"])
                    assert file == tmp_path / "16" / "memory" / "bucket"
                    assert file.read_bytes()[: 4 + i] == bytes([i] * (4 + i))
                rank_0.tell(EndPush())


def test_orders_do_not_collect_in_the_store(tmp_path, monkeypatch):
    """Each holds an entry for every relay: two more a push fill a large run's host memory."""
    counts = []
    with relays(tmp_path, monkeypatch, [1, 2]) as (rank_0, others):
        for _ in range(3):
            with following(others, [stream(1), stream(1)]):
                rank_0.tell(JoinStream())
                rank_0.ask([NOTHING, NOTHING], "to offer")
                rank_0.tell(EndPush())
            counts.append(rank_0._store.num_keys())
    assert counts[0] == counts[1] == counts[2], counts


def test_a_push_that_ends_early_leaves_the_stream_to_the_caller(tmp_path, monkeypatch):
    with relays(tmp_path, monkeypatch, [1]) as (rank_0, others):
        for before in (0, 1, 2):
            own_stream = stream(4)
            with following(others, [own_stream]):
                if before:
                    rank_0.tell(JoinStream())
                for _ in range(before - 1):
                    rank_0.ask([OFFER], "to offer")
                rank_0.tell(EndPush())
            assert len(list(own_stream)) == 4 - before


def test_a_node_without_memory_and_one_that_is_silent_are_named(tmp_path, monkeypatch):
    def no_memory(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with relays(tmp_path, monkeypatch, [1]) as (rank_0, others):
        monkeypatch.setattr("os.posix_fallocate", no_memory)
        with following(others, [stream(2)]):
            rank_0.tell(JoinStream())
            wanted = r"rank 1: .*bucket: 4 bytes of shared memory are not free \(No space left on device\)"
            with pytest.raises(PushFailed, match=wanted):
                rank_0.ask([OFFER], "to offer")
            rank_0.tell(EndPush())
        rank_0._timeout = 0.05
        with pytest.raises(PushFailed, match=r"rank\(s\) 1 did not answer in 0\.05 s: to look"):
            rank_0.ask([Discover()], "to look")


def test_a_rank_0_that_is_silent_is_a_named_wait(tmp_path, monkeypatch):
    with relays(tmp_path, monkeypatch, [1]) as (_, [other]):
        other._orders._timeout = 0.01
        with pytest.raises(RuntimeError, match=r"rank 1: .* rank 0 has said nothing for 0\.1 s"):
            other.follow(stream(1))


@pytest.mark.parametrize(
    ("orders", "problem"),
    [
        (
            [ShareBucket(0, False)],
            r"rank 0 has ordered ShareBucket\(handles=0, file=False\) without a bucket",
        ),
        ([JoinStream(), Discover()], r"rank 0 has ordered Discover\(\) amid the weight stream"),
    ],
)
def test_an_order_out_of_place_is_an_error(tmp_path, monkeypatch, orders, problem):
    """Fails on the old code, which took any other word for "stream" or "offer"."""
    with relays(tmp_path, monkeypatch, [1]) as (rank_0, [other]):
        for order in orders:
            rank_0.tell(order)
        with pytest.raises(AssertionError, match=problem):
            other.follow(stream(1))


def test_an_order_of_another_transport_is_an_error(tmp_path, monkeypatch):
    """Rank 0 refuses to send it, and a rank that is sent it says so."""
    with relays(tmp_path, monkeypatch, [1]) as (rank_0, [other]):
        with pytest.raises(
            AssertionError, match=r"Send\(\) is not one of Discover, JoinStream, ShareBucket, EndPush"
        ):
            rank_0.tell(Send())
        rank_0._orders = sharded.ORDERS
        rank_0.tell(Send())
        with pytest.raises(
            AssertionError, match=r"sent \['Send'\], which is not one of Discover, JoinStream"
        ):
            other.follow(stream(1))


class OnTwoGpus:
    """Stand-in for a server whose two ranks see both GPUs of its node."""

    url = "http://server"

    async def info(self, timeout: float) -> ServerInfo:
        return ServerInfo("0", "model", 256, 2)

    async def begin_update(self, timeout: float) -> None: ...

    async def tell_gpus(self, file: Path, timeout: float) -> None:
        for rank in range(2):
            Path(f"{file}.{rank}").write_text(json.dumps(["gpu 0", "gpu 1"]))

    async def receive_shared(self, specs: object, location: SharedLocation, timeout: float) -> None:
        self.location = location


def test_each_rank_of_a_server_maps_the_bucket_on_a_gpu_of_its_own(tmp_path, monkeypatch):
    """Rank 0 and a relay of the same node have a GPU each, and no byte leaves its GPU."""
    monkeypatch.setattr(shared_store, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(node, "gpu_uuid", lambda device: f"gpu {device.index}")
    monkeypatch.setattr(node, "shared_storage", lambda flat: {"of bytes": flat.tolist()})
    store, server = HashStore(), OnTwoGpus()
    memory_of_relay = NodeMemory("memory", torch.device("cuda", 1), first=False)
    transport = Shared(
        itself, PATIENCE, NodeMemory("memory", torch.device("cuda", 0)), Relays(store, [1], PATIENCE, ORDERS)
    )
    zeros, ones = (Bucket([], torch.full((2,), i, dtype=torch.uint8)) for i in range(2))

    async def push() -> None:
        await transport.begin([ServerHandle(server)], 1)
        assert await transport.send(zeros) == 2
        transport.over()

    with following([Relay(store, 1, memory_of_relay, PATIENCE)], [iter([ones])]):
        asyncio.run(push())
    assert server.location == [{"of bytes": [0, 0]}, {"of bytes": [1, 1]}]
    assert transport.metrics == {"sync/ipc": 1.0}
    memory_of_relay.close()
    assert (tmp_path / "memory").exists(), "it is the first rank's"
    asyncio.run(transport.close())
    assert not (tmp_path / "memory").exists()


def test_a_server_of_another_machine_is_named(tmp_path, monkeypatch):
    class Elsewhere(OnTwoGpus):
        async def tell_gpus(self, file: Path, timeout: float) -> None: ...

    monkeypatch.setattr(shared_store, "SHARED_MEMORY", tmp_path)
    transport = Shared(itself, PATIENCE, NodeMemory("memory", CPU), Relays(HashStore(), [], PATIENCE, ORDERS))
    with pytest.raises(
        PushFailed, match=r"transport=shared: 0 of the 2 rank\(s\) of http://server see .*memory"
    ):
        asyncio.run(transport.begin([ServerHandle(Elsewhere())], 1))
    asyncio.run(transport.close())


def test_a_server_that_dies_while_it_is_looked_for_fails_the_push_alone(tmp_path, monkeypatch):
    """Fails on the old code, which did not take the error for a server's: it ended the run."""

    class Dying(OnTwoGpus):
        async def info(self, timeout: float) -> ServerInfo:
            raise ServerGone("http://server/server_info: connection refused")

    monkeypatch.setattr(shared_store, "SHARED_MEMORY", tmp_path)
    transport = Shared(itself, PATIENCE, NodeMemory("memory", CPU), Relays(HashStore(), [], PATIENCE, ORDERS))
    handle = ServerHandle(Dying())
    with pytest.raises(PushFailed, match="connection refused") as failure:
        asyncio.run(transport.begin([handle], 1))
    assert failure.value.handles == [handle]
    asyncio.run(transport.close())


def test_a_relay_goes_on_to_the_next_collective_where_rank_0_has_no_memory(tmp_path, monkeypatch):
    """Otherwise rank 0 could wait for it there, and never say that the push is over."""

    class Without(OnTwoGpus):
        async def tell_gpus(self, file: Path, timeout: float) -> None:
            for rank in range(2):
                Path(f"{file}.{rank}").write_text("[]")

    def no_memory(*_: object) -> None:
        raise OSError(28, "No space left on device")

    further = threading.Event()

    def stream_of_two() -> Iterator[Bucket]:
        yield zeros
        further.set()
        yield zeros

    monkeypatch.setattr(shared_store, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("os.posix_fallocate", no_memory)
    zeros = Bucket([], torch.zeros(2, dtype=torch.uint8))
    store, memory = HashStore(), NodeMemory("memory", CPU)
    transport = Shared(itself, PATIENCE, memory, Relays(store, [1], PATIENCE, ORDERS))

    async def push() -> None:
        await transport.begin([ServerHandle(Without())], 1)
        with pytest.raises(PushFailed, match="2 bytes of shared memory are not free"):
            await transport.send(zeros)

    with following([Relay(store, 1, NodeMemory("memory", CPU, first=False), PATIENCE)], [stream_of_two()]):
        asyncio.run(push())
        assert further.wait(PATIENCE)
        transport.over()
    memory.close()


def test_the_loop_goes_on_while_a_failed_push_waits_for_relays():
    """Fails on the old code: other requests and health checks waited until the relays' time was over."""
    limit, store = 6.0, TCPStore("127.0.0.1", 0, is_master=True)
    relays = Relays(store, [1], limit, sharded.ORDERS)
    transport = sharded.Sharded(itself, "127.0.0.1", "gloo", limit, relays, torch.float32, 100)

    async def push() -> float:
        transport._group = transport._new_group(2)
        asking = asyncio.create_task(asyncio.to_thread(relays.ask, [Send()], "to send"))
        await asyncio.sleep(0.2)
        discarding = asyncio.create_task(transport._discard())
        begin = time.monotonic()
        await asyncio.sleep(0.01)
        seconds = time.monotonic() - begin
        store.set("answer.0.1", msgpack.packb(ANSWERS.encode(Done())))
        await asyncio.gather(asking, discarding)
        return seconds

    assert asyncio.run(push()) < limit / 2


def test_a_relay_hears_of_the_end_of_a_push_that_never_began(tmp_path, monkeypatch):
    """Rank 0 fails while it waits for requests in flight, when the relay is already in the push."""

    class Unstoppable(OnTwoGpus):
        async def abort(self, timeout: float) -> None:
            raise RuntimeError("not an answer of a server")

    async def under_way(handle: ServerHandle) -> None:
        handle.to(Pending())
        handle.calls.add(asyncio.create_task(asyncio.sleep(60)))

    monkeypatch.setattr(shared_store, "SHARED_MEMORY", tmp_path)
    store, loop = HashStore(), BackgroundLoop("test")
    memory, pool = NodeMemory("memory", CPU), ServerPool([Unstoppable()], ServersConfig(), [], print)
    publisher = Publisher(
        pool,
        loop,
        Shared(itself, PATIENCE, memory, Relays(store, [1], PATIENCE, ORDERS)),
        WeightSyncConfig(transport="shared"),
        dtype=torch.float32,
        device=CPU,
        expected={},
        optional=frozenset(),
        fp8=None,
        colocated=False,
        report=print,
    )
    own_stream = stream(2)
    loop.run(under_way(pool.handles[0]))
    assert publisher.next_command(1) == Push()
    with following([Relay(store, 1, NodeMemory("memory", CPU, first=False), PATIENCE)], [own_stream]):
        with pytest.raises(ExceptionGroup) as failure:
            publisher.attempt(iter(()), 1)
        assert failure.group_contains(RuntimeError, match="not an answer of a server")
    assert len(list(own_stream)) == 2, "the whole stream is left to the caller"
    publisher.close()
    loop.close()


def test_what_killed_runs_have_left_in_memory_is_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_store, "SHARED_MEMORY", tmp_path)
    living = NodeMemory(node.new_name(), CPU)
    anothers = tmp_path / "megatron_gvpo-main"  # as somebody's checkout may be called
    for directory in (tmp_path / node.new_name(), anothers):
        directory.mkdir()
        (directory / "bucket").write_bytes(bytes(100))
    new = NodeMemory(node.new_name(), CPU)
    assert {*tmp_path.iterdir()} == {anothers, living.directory, new.directory}
    living.close()
    new.close()
    assert [*tmp_path.iterdir()] == [anothers] and [*anothers.iterdir()]
