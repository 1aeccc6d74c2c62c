"""Relays offer buckets to rollout servers that share no memory with rank 0: on other GPUs, on other nodes.

Rank 0 speaks to all servers. Relays are all other ranks with a GPU; without GPUs, the first rank of each
other node. All ranks take part in the weight stream's collectives. Relays cut the stream into the same
buckets as rank 0, and offer each bucket to the servers beside them when rank 0 orders it. Orders and
answers go through the store where the ranks have met.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgpack
from torch import distributed as dist

from megatron_gvpo.servers.leader import Done, Failed, Messages
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.node import NodeMemory
from megatron_gvpo.weights.transport import Follower, PushFailed

PATIENCE = 10  # a relay waits for an order for this many times `rollout.weights.timeout`


@dataclass(frozen=True)
class Discover:
    """Answer with the servers that were seen on the node, and the rank's GPU."""


@dataclass(frozen=True)
class JoinStream:
    """Take part in the weight stream, in which rank 0 takes part from now on."""


@dataclass(frozen=True)
class ShareBucket:
    """Offer the stream's next bucket by `handles` handles of the GPU's memory, and as a file if `file`."""

    handles: int
    file: bool


@dataclass(frozen=True)
class EndPush:
    """The push has ended. Relays do not answer this order."""


ORDERS = Messages[Discover | JoinStream | ShareBucket | EndPush](Discover, JoinStream, ShareBucket, EndPush)
ANSWERS = Messages[Done | Failed](Done, Failed)


class Relays[T]:
    """Rank 0's side: sends `orders` to the relays, which are `ranks`, and waits for their answers."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], timeout: float, orders: Messages[T]) -> None:
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
        self._ranks, self._timeout, self._orders = list(ranks), timeout, orders
        self._number = 0
        self._oldest = 0  # the first order that the store may still have

    def __len__(self) -> int:
        return len(self._ranks)

    def tell(self, order: T) -> None:
        """Give all relays an order that they do not answer."""
        self._send([order] * len(self._ranks))

    def ask(self, orders: Sequence[T], doing: str) -> list[Any]:
        """Give each relay its own order; return their answers.

        Raises PushFailed for a relay that failed or does not answer.
        """
        if not self._ranks:
            return []
        number = self._number
        self._send(orders)
        keys = [f"answer.{number}.{rank}" for rank in self._ranks]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout))
        except RuntimeError:
            silent = [
                rank for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])
            ]
            listed = ", ".join(map(str, silent))
            raise PushFailed(f"rank(s) {listed} did not answer in {self._timeout:g} s: {doing}", []) from None
        answers = [ANSWERS.decode(msgpack.unpackb(packed)) for packed in self._store.multi_get(keys)]
        # All ranks have read this order, and the earlier ones, which need no answer.
        for old in range(self._oldest, number + 1):
            self._store.delete_key(f"order.{old}")
        self._oldest = number + 1
        payloads = []
        for rank, answer in zip(self._ranks, answers, strict=True):
            if isinstance(answer, Failed):
                raise PushFailed(f"rank {rank}: {answer.problem}", [])
            payloads.append(answer.payload)
        return payloads

    def _send(self, orders: Sequence[T]) -> None:
        if self._ranks:
            encoded = {
                rank: self._orders.encode(order) for rank, order in zip(self._ranks, orders, strict=True)
            }
            self._store.set(f"order.{self._number}", msgpack.packb(encoded))
            self._number += 1


class Orders[T]:
    """The orders that rank 0 sends to `rank`, and the answers."""

    def __init__(self, store: dist.Store, rank: int, timeout: float, orders: Messages[T]) -> None:
        # Orders have a separate connection, because a connection that waits blocks other threads that use it.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
        self._rank, self._timeout, self._orders = rank, timeout, orders
        self._number = 0

    def next(self) -> T:
        """Wait for the next order. Raises RuntimeError if rank 0 falls silent."""
        key, limit = f"order.{self._number}", PATIENCE * self._timeout
        try:
            self._store.wait([key], timedelta(seconds=limit))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank}: in a weight push, rank 0 has said nothing for {limit:g} s ({error})"
            ) from None
        orders = msgpack.unpackb(self._store.get(key), strict_map_key=False)
        self._store.delete_key(self._answer_key())  # rank 0 has read the answer
        self._number += 1
        return self._orders.decode(orders[self._rank])

    def answer(self, answer: Done | Failed) -> None:
        self._store.set(self._answer_key(), msgpack.packb(ANSWERS.encode(answer)))

    def _answer_key(self) -> str:
        return f"answer.{self._number - 1}.{self._rank}"


class Relay(Follower):
    """A relay's side, on `rank`."""

    def __init__(self, store: dist.Store, rank: int, memory: NodeMemory, timeout: float) -> None:
        self._orders, self._memory = Orders(store, rank, timeout, ORDERS), memory

    def follow(self, buckets: Iterator[Bucket]) -> None:
        """Carry out the orders of one push until it ends. Raises RuntimeError if rank 0 falls silent.

        The caller must iterate the rest of the stream.
        """
        while True:
            match self._orders.next():
                case Discover():
                    self._orders.answer(Done(self._memory.seen()))
                case JoinStream():
                    for bucket in buckets:
                        if not self._share(bucket):
                            return
                case EndPush():
                    return
                case order:
                    raise AssertionError(f"rank 0 has ordered {order} without a bucket")

    def _share(self, bucket: Bucket) -> bool:
        """Offer the bucket as the next order says. Returns False if that order ends the push."""
        match self._orders.next():
            case ShareBucket(handles, file):
                try:
                    self._orders.answer(Done(self._memory.offer(bucket.flat, handles, file)))
                except PushFailed as failure:
                    self._orders.answer(Failed(str(failure)))
                return True
            case EndPush():
                return False
            case order:
                raise AssertionError(f"rank 0 has ordered {order} amid the weight stream")

    def close(self) -> None:
        self._memory.close()
