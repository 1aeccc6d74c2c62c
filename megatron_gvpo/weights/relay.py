"""Buckets for the rollout servers of other nodes, which share no memory with rank 0.

Rank 0 speaks to all servers. The first rank of every other node takes part in the weight stream's collectives
anyway; it cuts the same stream into the same buckets, and offers each of them to the servers beside it when
rank 0 says so. They speak through the store at which the ranks have met.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import distributed as dist

from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.node import NodeMemory
from megatron_gvpo.weights.transport import PushFailed

POLL = 0.002  # seconds between looks at the store, which a waiting call would keep from other threads
PATIENCE = 10  # a relay waits so many timeouts of a push's steps for the next order

Order = dict[str, Any]


class Relays:
    """Rank 0's side: orders to the relays of the other nodes, whose ranks these are, and their answers."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], timeout: float) -> None:
        self._store, self._ranks, self._timeout = store, list(ranks), timeout
        self._number = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def tell(self, order: Order) -> None:
        self._store.set(f"order.{self._number}", json.dumps(order))
        self._number += 1

    def ask(self, orders: Sequence[Order], doing: str) -> list[dict[str, Any]]:
        """Each node's answer to its own order. Raises PushFailed for what a relay could not do."""
        asked = self._number
        self.tell({"each": dict(zip(map(str, self._ranks), orders, strict=True))})
        answers, deadline = [], time.monotonic() + self._timeout
        for rank in self._ranks:
            said = _get(self._store, f"answer.{asked}.{rank}", deadline)
            if said is None:
                raise PushFailed(f"rank {rank} did not answer in {self._timeout:g} s: {doing}", [])
            if "problem" in said:
                raise PushFailed(f"rank {rank}: {said['problem']}", [])
            answers.append(said)
        self._store.delete_key(f"order.{asked}")
        return answers


class Relay:
    """The side of another node's first rank, which is `rank`."""

    def __init__(self, store: dist.Store, rank: int, memory: NodeMemory, timeout: float) -> None:
        self._store, self._rank, self._memory, self._timeout = store, rank, memory, timeout
        self._number = 0

    def follow(self, buckets: Iterator[Bucket]) -> None:
        """Carry out the orders of one push, to its end. Raises RuntimeError where none comes any more.

        What is left of the stream then is for the caller to take part in.
        """
        while (order := self._next())["do"] != "over":
            if order["do"] == "look":
                self._answer(self._memory.seen())
                continue
            for bucket in buckets:  # from here on rank 0, too, takes part in the stream
                if (order := self._next())["do"] == "over":
                    return
                try:
                    self._answer(self._memory.offer(bucket.flat, order["handles"], order["file"]))
                except PushFailed as failure:
                    self._answer({"problem": str(failure)})

    def _next(self) -> Order:
        order = _get(self._store, f"order.{self._number}", time.monotonic() + PATIENCE * self._timeout)
        if order is None:
            raise RuntimeError(
                f"rank {self._rank}: in a weight push, rank 0 has said nothing for "
                f"{PATIENCE * self._timeout:g} s"
            )
        self._number += 1
        found: Order = order["each"][str(self._rank)] if "each" in order else order
        return found

    def _answer(self, said: dict[str, Any]) -> None:
        self._store.set(f"answer.{self._number - 1}.{self._rank}", json.dumps(said))


def _get(store: dist.Store, key: str, deadline: float) -> dict[str, Any] | None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL)
    found: dict[str, Any] = json.loads(store.get(key))
    return found
