"""Relays offer buckets to rollout servers that share no memory with rank 0: on other GPUs, on other nodes.

Rank 0 speaks to all servers. The other ranks take part in the weight stream's collectives anyway. Relays are
every other rank with a GPU; without GPUs, the first rank of every other node. They cut the same stream into
the same buckets, and offer each bucket to the servers beside them when rank 0 orders it. Orders and answers
go through the store where the ranks have met.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.node import NodeMemory
from megatron_gvpo.weights.transport import Follower, PushFailed

PATIENCE = 10  # a relay waits for an order for this many times `rollout.weights.timeout`

Order = dict[str, Any]


class Relays:
    """Rank 0's side: sends orders to the relays, which are `ranks`, and waits for their answers."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], timeout: float) -> None:
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
        self._ranks, self._timeout = list(ranks), timeout
        self._number = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def tell(self, order: Order) -> None:
        """Give all relays an order that they do not answer."""
        if self._ranks:
            self._store.set(f"order.{self._number}", json.dumps(order))
            self._number += 1

    def ask(self, orders: Sequence[Order], doing: str) -> list[dict[str, Any]]:
        """Give each relay its own order; returns the answers. Raises PushFailed for an error or no answer."""
        if not self._ranks:
            return []
        asked = self._number
        self.tell({"each": dict(zip(map(str, self._ranks), orders, strict=True))})
        keys = [f"answer.{asked}.{rank}" for rank in self._ranks]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout))
        except RuntimeError:
            silent = [
                rank for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])
            ]
            listed = ", ".join(map(str, silent))
            raise PushFailed(f"rank(s) {listed} did not answer in {self._timeout:g} s: {doing}", []) from None
        answers = [json.loads(said) for said in self._store.multi_get(keys)]
        self._store.delete_key(f"order.{asked}")
        for rank, said in zip(self._ranks, answers, strict=True):
            if "problem" in said:
                raise PushFailed(f"rank {rank}: {said['problem']}", [])
        return answers


class Orders:
    """Rank 0's orders to `rank`, and the answers."""

    def __init__(self, store: dist.Store, rank: int, timeout: float) -> None:
        # A connection of its own, because one that waits blocks all other threads that use it.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
        self._rank, self._timeout = rank, timeout
        self._number = 0

    def next(self) -> Order:
        """Wait for the next order. Raises RuntimeError if rank 0 falls silent."""
        key, limit = f"order.{self._number}", PATIENCE * self._timeout
        try:
            self._store.wait([key], timedelta(seconds=limit))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank}: in a weight push, rank 0 has said nothing for {limit:g} s ({error})"
            ) from None
        order: Order = json.loads(self._store.get(key))
        self._store.delete_key(self._answer_key())  # rank 0 has read it
        self._number += 1
        found: Order = order["each"][str(self._rank)] if "each" in order else order
        return found

    def answer(self, said: dict[str, Any]) -> None:
        self._store.set(self._answer_key(), json.dumps(said))

    def _answer_key(self) -> str:
        return f"answer.{self._number - 1}.{self._rank}"


class Relay(Follower):
    """A relay's side, on `rank`."""

    def __init__(self, store: dist.Store, rank: int, memory: NodeMemory, timeout: float) -> None:
        self._orders, self._memory = Orders(store, rank, timeout), memory

    def follow(self, buckets: Iterator[Bucket]) -> None:
        """Carry out the orders of one push, to its end. Raises RuntimeError if rank 0 falls silent.

        The caller must iterate what is then left of the stream.
        """
        while (order := self._orders.next())["do"] != "over":
            if order["do"] == "look":
                self._orders.answer(self._memory.seen())
                continue
            for bucket in buckets:  # rank 0 takes part in the stream from here on
                if (order := self._orders.next())["do"] == "over":
                    return
                try:
                    self._orders.answer(self._memory.offer(bucket.flat, order["handles"], order["file"]))
                except PushFailed as failure:
                    self._orders.answer({"problem": str(failure)})

    def close(self) -> None:
        self._memory.close()
