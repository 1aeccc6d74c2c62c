"""Orders of rank 0 and what the first ranks of other nodes make of them, in threads, over a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from megatron_gvpo.rollout.server import TensorSpec
from megatron_gvpo.weights import node
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.node import NodeMemory
from megatron_gvpo.weights.relay import Relay, Relays
from megatron_gvpo.weights.transport import PushFailed

OFFER = {"do": "offer", "handles": 0, "file": True}
NOTHING = {"do": "offer", "handles": 0, "file": False}
CPU = torch.device("cpu")


def stream(count: int) -> Iterator[Bucket]:
    """Buckets of growing sizes; bucket i holds i everywhere."""
    for i in range(count):
        flat = torch.full((4 + i,), i, dtype=torch.uint8)
        yield Bucket([TensorSpec("weight", "uint8", (4 + i,))], flat)


@contextmanager
def relays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: list[int]) -> Iterator[tuple]:
    """Rank 0's side and the others', whose nodes have shared memory of their own."""
    store, others = HashStore(), []
    for rank in ranks:
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setattr(node, "SHARED_MEMORY", tmp_path / str(rank))
        others.append(Relay(store, rank, NodeMemory("memory", CPU), 5.0))
    yield Relays(store, ranks, 5.0), others
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
        thread.join(20)
        assert not thread.is_alive(), "a relay did not hear that the push was over"


def test_two_pushes_to_two_other_nodes(tmp_path, monkeypatch):
    with relays(tmp_path, monkeypatch, [8, 16]) as (mine, others):
        for push in range(2):
            with following(others, [stream(3), stream(3)]):
                (tmp_path / "16" / "memory" / f"{push}.told.123").write_text('["gpu"]')
                found = mine.ask([{"do": "look"}] * 2, "to look")
                assert found == [{"told": {}, "gpu": ""}, {"told": {str(push): [["gpu"]]}, "gpu": ""}]
                mine.tell({"do": "stream"})
                for i in range(3):
                    nothing, offer = mine.ask([NOTHING, OFFER], "to offer")
                    assert nothing == {"handles": [], "file": ""}
                    file = Path(offer["file"])
                    assert file == tmp_path / "16" / "memory" / "bucket"
                    assert file.read_bytes()[: 4 + i] == bytes([i] * (4 + i))
                mine.tell({"do": "over"})


def test_a_push_that_ends_early_leaves_the_stream_to_the_caller(tmp_path, monkeypatch):
    with relays(tmp_path, monkeypatch, [1]) as (mine, others):
        for before in (0, 1, 2):
            left = stream(4)
            with following(others, [left]):
                if before:
                    mine.tell({"do": "stream"})
                for _ in range(before - 1):
                    mine.ask([OFFER], "to offer")
                mine.tell({"do": "over"})
            assert len(list(left)) == 4 - before


def test_a_node_without_memory_and_one_that_is_silent_are_named(tmp_path, monkeypatch):
    def no_memory(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with relays(tmp_path, monkeypatch, [1]) as (mine, others):
        monkeypatch.setattr("os.posix_fallocate", no_memory)
        with following(others, [stream(2)]):
            mine.tell({"do": "stream"})
            wanted = (
                r"rank 1: .*bucket: no 4 bytes of shared memory \(No space left on device\): lower rollout"
            )
            with pytest.raises(PushFailed, match=wanted):
                mine.ask([OFFER], "to offer")
            mine.tell({"do": "over"})
        mine._timeout = 0.05
        with pytest.raises(PushFailed, match=r"rank 1 did not answer in 0\.05 s: to look"):
            mine.ask([{"do": "look"}], "to look")


def test_a_rank_0_that_is_silent_is_a_named_wait(tmp_path, monkeypatch):
    with relays(tmp_path, monkeypatch, [1]) as (_, [other]):
        other._timeout = 0.01
        with pytest.raises(RuntimeError, match=r"rank 1: .* rank 0 has said nothing for 0\.1 s"):
            other.follow(stream(1))
