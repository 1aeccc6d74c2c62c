"""Sends shards of weights through memory to servers on the trainer's GPUs, with which NCCL forms no group.

The plan is that of a sharded push (megatron_gvpo.weights.sharded), except that servers pass nothing on. Every
server rank has a porter: the trainer rank on its GPU, or without GPUs one on its machine. The porter puts
each round of the server rank's cells into a mailbox: its own weights, and the cells that it gets from the
nearest ranks that hold the rest, over a process group of the trainer's ranks.

A mailbox is memory from which one rank of a server takes its parts of the weights. Both are processes on the
same machine, and on the same GPU if they have one. A mailbox has room for two rounds of a push.
megatron_gvpo_mailbox, in the servers, is the other end and describes the file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.core.collectives import all_gather_msgpack, broadcast_msgpack
from megatron_gvpo.servers.server import Server
from megatron_gvpo.weights.group import Membership, WeightGroup, exchange, group_address
from megatron_gvpo.weights.node import NodeMemory, gpu_uuid, new_name, reserved, shared_storage
from megatron_gvpo.weights.relay import Orders, Relays
from megatron_gvpo.weights.shard_plan import Layout, Message, PushPlan, Table, plan_push, unpack_part
from megatron_gvpo.weights.sharded import (
    ORDERS,
    STOP,
    Order,
    Sender,
    Sharded,
    ShardedReceiver,
    ShardFollower,
    read_packed,
    run_store,
)
from megatron_gvpo.weights.transport import Follower, PushFailed, PushSettings

if TYPE_CHECKING:
    from megatron_gvpo.megatron.model.own_weights import OwnWeights


@dataclass(frozen=True)
class Seat:
    """The machine and the GPU of a rank."""

    node: int | None  # the trainer's first rank on the machine; None for a server's rank on another machine
    gpu: str  # a UUID, "" on a CPU


class Colocated(Sharded):
    """Rank 0's side of a push to servers on the trainer's GPUs."""

    def __init__(
        self,
        receiver: Callable[[Server], ShardedReceiver],
        address: str,
        backend: str,
        timeout: float,
        relays: Relays[Order],
        dtype: torch.dtype,
        limit: int,
        memory: NodeMemory,
        seats: Sequence[Seat],
    ) -> None:
        """`seats` are the seats of the trainer's ranks. The other arguments are those of Sharded."""
        super().__init__(receiver, address, backend, timeout, relays, dtype, limit)
        self._memory, self._seats = memory, list(seats)
        self._porters: list[int] = []  # of each server rank

    @classmethod
    def create(cls, settings: PushSettings, receiver: Callable[[Server], Any]) -> Self:
        name, memory, seats = _meet(settings.device)
        weights = settings.rollout.weights
        return cls(
            receiver,
            group_address(settings.rollout),
            "nccl" if settings.device.type == "cuda" else "gloo",
            weights.timeout,
            Relays(run_store(name), list(range(1, len(seats))), weights.timeout, ORDERS),
            getattr(torch, settings.model.dtype),
            weights.bucket_bytes // 2,  # a mailbox has room for two rounds
            memory,
            seats,
        )

    @classmethod
    def follower(cls, settings: PushSettings) -> Follower | None:
        name, memory, _ = _meet(settings.device)
        timeout = settings.rollout.weights.timeout
        orders = Orders(run_store(name), dist.get_rank(), timeout, ORDERS)
        return PorterFollower(orders, getattr(torch, settings.model.dtype), timeout, memory)

    @property
    def metrics(self) -> dict[str, float]:
        """`sync/most_sent`: the bytes of the trainer rank that sent most to other ranks of the trainer."""
        sent: Counter[int] = Counter()
        for (source, target), size in self.counted.items():
            sent[source] += size * (self._porters[target - self._trainers] != source)
        return super().metrics | {"sync/most_sent": float(max(sent.values(), default=0))}

    async def close(self) -> None:
        await super().close()
        self._memory.close()

    def _new_group(self, world: int) -> WeightGroup:
        return WeightGroup(
            self._address,
            world,
            self._backend,
            min(60.0, self._timeout),
            self._timeout,
            self.max_ctas,
            str(self._memory.directory),
            self._trainers,
        )

    def _new_sender(self, member: Membership) -> Sender:
        return Porter(member, self._dtype, self._timeout, lambda: member.store.check([STOP]), self._memory)

    def _new_plan(self, tables: Sequence[Table], needed: Sequence[Sequence[Layout]]) -> PushPlan:
        assert self._group is not None
        store = self._group.membership().store
        servers = [handle for handle, ranks in zip(self._handles, needed, strict=True) for _ in ranks]
        written = [
            Seat(**json.loads(store.get(f"seat.{rank}")))
            for rank in range(self._trainers, self._rendezvous.world_size)
        ]
        chosen = porters(self._seats, written)
        for handle, porter, seat in zip(servers, chosen, written, strict=True):
            if porter is None:
                raise PushFailed(
                    f"rollout.weights.transport=colocated: {handle.server.url} has a rank on "
                    f"{f'the GPU {seat.gpu}' if seat.gpu else 'a CPU'}, and no rank of the trainer is there: "
                    "servers must be on the trainer's own GPUs, or for a trainer on CPUs on its machines, as "
                    f"this user, with the same /dev/shm (they look for {self._memory.directory}). For others "
                    "use sharded or broadcast",
                    [handle],
                )
        self._porters = [porter for porter in chosen if porter is not None]
        store.set("porters", json.dumps(self._porters))
        ranks = [*range(self._trainers), *self._porters]
        seats = [(rank, self._seats[rank].node or 0) for rank in ranks]
        return plan_push(tables, self.layouts, needed, self._limit, seats)


def porters(trainers: Sequence[Seat], servers: Sequence[Seat]) -> list[int | None]:
    """The porter of each server rank: the trainer rank on its GPU, or without GPUs one on its machine.

    A server rank for which there is no such trainer rank has None.
    """
    taken: Counter[int] = Counter()
    chosen: list[int | None] = []
    for seat in servers:
        near = [rank for rank, other in enumerate(trainers) if other == seat]
        porter = min(near, key=lambda rank: taken[rank], default=None)
        chosen.append(porter)
        if porter is not None:
            taken[porter] += 1
    return chosen


class Porter(Sender):
    """Sends one trainer rank's weights, and fills the mailboxes of the server ranks on its GPU or machine."""

    def __init__(
        self,
        member: Membership,
        dtype: torch.dtype,
        timeout: float,
        stopped: Callable[[], bool],
        memory: NodeMemory,
    ) -> None:
        """`memory`: the directory of the mailboxes' files. The other arguments are those of Sender."""
        super().__init__(member, dtype, timeout, lambda: stopped() or self._has_failed_server())
        self._memory = memory
        self._porters: list[int] = []  # of each server rank
        self._trainers = 0
        # by server rank beside this one: messages of each round
        self._receives: dict[int, list[list[Message]]] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._itemsizes: list[int] = []
        self._pushes = 0

    def send(self, own: OwnWeights) -> None:
        """Send this rank's part of a push, and give the server ranks beside it their parts.

        Raises Stopped and PushFailed, and torch's RuntimeError if another rank of the trainer has failed.
        """
        try:
            self._send(own)
        except BaseException:
            self.close()  # ranks that wait for this one fail
            raise

    def close(self) -> None:
        if self._member.group is not None:
            super().close()
        self._member = replace(self._member, group=None)  # the connections end when nothing refers to it
        self._mailboxes.clear()

    def _send(self, own: OwnWeights) -> None:
        if self._rounds is None:
            self._connect(own)
        assert self._rounds is not None
        store = self._member.store
        for rank, mailbox in self._mailboxes.items():
            store.set(f"mailbox.{rank}.{self._pushes}", json.dumps(mailbox.open()))
            if self._pushes:  # the server has read the key, because it took all rounds of that push
                store.delete_key(f"mailbox.{rank}.{self._pushes - 1}")
        counted: Counter[str] = Counter()
        for number, messages in enumerate(self._rounds):
            self._wait_for_servers(Mailbox.has_room, "load a round")
            self._carry_out(own, number, messages)
            for message in messages:
                counted[f"{message.source}-{message.target}"] += self._size(message)
        self._wait_for_servers(Mailbox.is_empty, "load the last round")
        self._pushes += 1
        store.set(f"counted.{self._member.rank}", json.dumps(counted))
        if own.tensors[0].is_cuda:  # release the GPU memory, which the servers need
            self._buffers.clear()
            for mailbox in self._mailboxes.values():
                mailbox.close()
            torch.cuda.ipc_collect()

    def _connect(self, own: OwnWeights) -> None:
        """Read the plan, make the mailboxes, and let NCCL connect this rank with others of the trainer."""
        rank, store, device = self._member.rank, self._member.store, own.tensors[0].device
        self._itemsizes = [getattr(torch, dtype).itemsize for _, dtype, _ in read_packed(store, "tables")]
        self._porters = json.loads(store.get("porters"))
        rounds = self._read_plan(own)
        self._trainers = self._member.group.size()
        beside = [self._trainers + i for i, porter in enumerate(self._porters) if porter == rank]
        for server in beside:
            self._receives[server] = unpack_part(store.get(f"plan.{server}"), server).receives
            turn = max((sum(map(self._size, messages)) for messages in self._receives[server]), default=0)
            self._mailboxes[server] = Mailbox(self._memory.directory / f"bucket.{server}", turn, device)
        targets = {self._porter(message) for messages in rounds for message in messages}
        received = [m for part in self._receives.values() for messages in part for m in messages]
        self._meet(device, targets - {rank}, {message.source for message in received} - {rank})
        self._rounds = rounds

    def _carry_out(self, own: OwnWeights, number: int, messages: Sequence[Message]) -> None:
        """Send the messages of a round, and put the received cells into the mailboxes."""
        rank = self._member.rank
        outgoing = [
            (self._porter(message), self._fill(own, message, 0))
            for message in messages
            if self._porter(message) != rank
        ]
        incoming = []
        for server, mailbox in self._mailboxes.items():
            room = mailbox.room()
            for message in self._receives[server][number]:
                wire, room = room[: self._size(message)], room[self._size(message) :]
                if message.source == rank:
                    self._copy([self._view(own, cell) for cell in message.cells], wire)
                else:
                    incoming.append((message.source, wire))
        # Two ranks exchange the messages of a round in the order of the server ranks that they are for.
        self._wait(exchange(self._member.group, outgoing, sorted(incoming, key=lambda pair: pair[0])))
        if own.tensors[0].is_cuda:
            torch.cuda.current_stream(own.tensors[0].device).synchronize()
        for mailbox in self._mailboxes.values():
            mailbox.put()

    def _wait_for_servers(self, is_ready: Callable[[Mailbox], bool], doing: str) -> None:
        for rank, mailbox in self._mailboxes.items():
            self._until(
                partial(is_ready, mailbox), f"rank {rank - self._trainers} of the servers, to {doing},"
            )

    def _has_failed_server(self) -> bool:
        return any(self._member.store.check([f"failed.{rank}"]) for rank in self._mailboxes)

    def _porter(self, message: Message) -> int:
        return self._porters[message.target - self._trainers]

    def _size(self, message: Message) -> int:
        return sum(cell.box.elements * self._itemsizes[cell.tensor] for cell in message.cells)


class PorterFollower(ShardFollower):
    """The side of a trainer rank other than 0 in such a push."""

    def __init__(self, orders: Orders[Order], dtype: torch.dtype, timeout: float, memory: NodeMemory) -> None:
        super().__init__(orders, dtype, timeout, partial(Porter, memory=memory))
        self._memory = memory

    def close(self) -> None:
        super().close()
        self._memory.close()


def _meet(device: torch.device) -> tuple[str, NodeMemory, list[Seat]]:
    """The run's name, this node's memory, and the seats of all ranks of the trainer. A collective."""
    name = broadcast_msgpack(new_name())
    memory = NodeMemory(name, device)
    gpu = gpu_uuid(device) if device.type == "cuda" else ""
    seats = all_gather_msgpack(astuple(Seat(memory.first_rank(dist.get_rank()), gpu)))
    return name, memory, [Seat(*seat) for seat in seats]


HEADER = 64  # bytes before the rounds in the file


class Mailbox:
    """The mailbox of one server rank, for all pushes over one group."""

    def __init__(self, file: Path, turn: int, device: torch.device) -> None:
        """`turn`: bytes of a round at most. Raises PushFailed if there is no memory for the file."""
        self._file, self._turn, self._device = file, max(1, turn), device
        self._on_gpu = device.type == "cuda"
        file.unlink(missing_ok=True)  # a server that has left an earlier group may still write in its file
        flat = reserved(file, HEADER + (0 if self._on_gpu else 2 * self._turn))
        self._counters = flat[:16].view(torch.int64)  # rounds put in, rounds taken out
        self._data = flat[HEADER:]
        self._put = 0

    def open(self) -> dict[str, Any]:
        """Prepare for a push; returns where the memory is, for the server's end."""
        handle = None
        if self._on_gpu:
            self._data = torch.empty(2 * self._turn, dtype=torch.uint8, device=self._device)
            handle = shared_storage(self._data)
        return {"file": str(self._file), "turn": self._turn, "handle": handle}

    def has_room(self) -> bool:
        """True if the server has taken out the round before the last."""
        return bool(self._counters[1] >= self._put - 1)

    def is_empty(self) -> bool:
        return bool(self._counters[1] >= self._put)

    def room(self) -> Tensor:
        """The memory of the next round, uint8 [turn], if the mailbox `has_room`."""
        first = self._put % 2 * self._turn
        return self._data[first : first + self._turn]

    def put(self) -> None:
        """Note that the next round is complete."""
        self._put += 1
        self._counters[0] = self._put

    def close(self) -> None:
        """Free the GPU's memory until the next push."""
        if self._on_gpu:
            self._data = self._data.new_empty(0)
