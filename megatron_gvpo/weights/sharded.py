"""Sends shards of weights: each trainer rank sends parts of its shards, each server rank gets its own parts.

No rank gathers whole tensors. All ranks of the trainer and of the servers are in one process group. The first
push over a group reads the servers' layouts, and rank 0 plans from them and from the trainer's
(megatron_gvpo.weights.shard_plan). Then each rank carries out its part of the plan, push after push.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.servers.leader import Done, Failed, Messages
from megatron_gvpo.servers.server import Server
from megatron_gvpo.weights.broadcast import LEAVE, GroupReceiver, GroupTransport
from megatron_gvpo.weights.bucket import sent_as
from megatron_gvpo.weights.group import (
    Background,
    Membership,
    Rendezvous,
    WeightGroup,
    exchange,
    group_address,
    join,
)
from megatron_gvpo.weights.node import new_name
from megatron_gvpo.weights.relay import EndPush, Orders, Relays
from megatron_gvpo.weights.shard_plan import (
    Box,
    Cell,
    Layout,
    Message,
    PushPlan,
    Table,
    plan_push,
    unpack_part,
)
from megatron_gvpo.weights.transport import Follower, PushFailed, PushSettings

if TYPE_CHECKING:
    from megatron_gvpo.megatron.model.own_weights import OwnPart, OwnWeights


STOP = "stop"  # a key of the group's store: the push has failed


@dataclass(frozen=True)
class SendLayout:
    """Write the layout of the rank's weights to the group's store."""


@dataclass(frozen=True)
class Send:
    """Send the rank's shards, as rank 0 has planned."""


@dataclass(frozen=True)
class Leave:
    """An order to leave the group; the rank sends no answer."""


Order = Rendezvous | SendLayout | Send | Leave | EndPush  # a Rendezvous: join the group there
ORDERS: Messages[Order] = Messages(Rendezvous, SendLayout, Send, Leave, EndPush)


class ShardedReceiver(GroupReceiver):
    """The calls to a server that a sharded push needs."""

    @abstractmethod
    async def read_layout(self, rendezvous: Rendezvous, rank_offset: int, timeout: float) -> None:
        """Every rank of the server writes its layout to the group's store."""

    @abstractmethod
    async def receive_shards(self, timeout: float) -> None:
        """Every rank takes part in a push; returns when its weights are loaded."""


class Sharded(GroupTransport[ShardedReceiver]):
    """The transport on rank 0, which leads the push and sends its own part like the other ranks.

    As with a broadcast, a group is kept from push to push while the servers are the same, and never used
    again after a failure.
    """

    # Messages need few of a GPU's blocks, and servers have little memory for the buffers of each.
    max_ctas = 4

    def __init__(
        self,
        receiver: Callable[[Server], ShardedReceiver],
        address: str,
        backend: str,
        timeout: float,
        relays: Relays[Order],
        dtype: torch.dtype,
        limit: int,
    ) -> None:
        """`relays` give the trainer's other ranks orders; `limit`: bytes that a rank sends in a round."""
        super().__init__(receiver, address, backend, timeout, trainers=1 + len(relays))
        self._relays, self._dtype, self._limit = relays, dtype, limit
        self._sender: Sender | None = None
        self.plan: PushPlan | None = None
        self.layouts: list[Layout] = []  # one for each trainer rank
        self.counted: Counter[tuple[int, int]] = Counter()  # bytes over each link in the last push

    @classmethod
    def create(cls, settings: PushSettings, receiver: Callable[[Server], Any]) -> Self:
        name = broadcast_msgpack(new_name())
        weights = settings.rollout.weights
        timeout, others = weights.timeout, range(1, dist.get_world_size())
        return cls(
            receiver,
            group_address(settings.rollout),
            "nccl" if settings.device.type == "cuda" else "gloo",
            timeout,
            Relays(run_store(name), list(others), timeout, ORDERS),
            getattr(torch, settings.model.dtype),
            weights.bucket_bytes // 2,  # half a bucket, as for other transports
        )

    @classmethod
    def follower(cls, settings: PushSettings) -> Follower | None:
        name = broadcast_msgpack(None)
        timeout = settings.rollout.weights.timeout
        orders = Orders(run_store(name), dist.get_rank(), timeout, ORDERS)
        return ShardFollower(orders, getattr(torch, settings.model.dtype), timeout, Sender)

    @property
    def metrics(self) -> dict[str, float]:
        """`sync/most_sent`: the bytes of the trainer rank that sent most."""
        sent: Counter[int] = Counter()
        for (source, _), size in self.counted.items():
            sent[source] += size
        most = max((sent[rank] for rank in range(self._trainers)), default=0)
        return super().metrics | {"sync/most_sent": float(most)}

    async def send_own(
        self, own: OwnWeights, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str]
    ) -> int:
        """Send all ranks' parts; returns the bytes of the tensors that servers have.

        `expected`: shapes of the servers' tensors by name; the trainer may lack those in `optional`. Raises
        PushFailed, and ValueError for tensors that servers have and the trainer does not.
        """
        assert self._group is not None and self._sender is not None, "begin first"
        async with self._whole_or_discarded():
            if self.plan is None:
                await self._prepare(own, expected, optional)
            begin = time.monotonic()
            await self._all_at_once(own)
            self._wire_s = time.monotonic() - begin
        assert self.plan is not None
        self.counted = self._counts(self._group.membership())
        if self.counted != self.plan.link_bytes():
            raise AssertionError("the bytes that were sent are not those of the plan")
        sizes = {parcel.cell: parcel.nbytes for parcel in self.plan.parcels}  # several ranks may get a cell
        return sum(sizes.values())

    def over(self) -> None:
        self._relays.tell(EndPush())

    async def _connect(self, group: WeightGroup, prefixes: Sequence[str]) -> None:
        """Form the group: rank 0, the trainer's other ranks, and meanwhile the servers."""
        orders = [group.rendezvous] * len(self._relays)
        others = asyncio.to_thread(self._relays.ask, orders, "to join the group")
        await asyncio.gather(super()._connect(group, prefixes), others)
        member = group.membership()
        self._sender = self._new_sender(member)

    def _new_sender(self, member: Membership) -> Sender:
        """This rank's sender in a new group."""
        return Sender(member, self._dtype, self._timeout, lambda: member.store.check([STOP]))

    def _new_plan(self, tables: Sequence[Table], needed: Sequence[Sequence[Layout]]) -> PushPlan:
        """The plan of a group's pushes to the servers whose ranks need `needed`."""
        return plan_push(tables, self.layouts, needed, self._limit)

    async def _prepare(
        self, own: OwnWeights, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str]
    ) -> None:
        """Read the layouts, plan, and give each rank its part."""
        assert self._group is not None
        store = self._group.membership().store
        trainer_parts = await self._parts_of_trainer(own, store)
        dtypes = {name: dtype for parts in trainer_parts for name, dtype, *_ in parts}
        own_dtype = str(self._dtype).removeprefix("torch.")
        tables = [
            (name, dtypes.get(name, own_dtype), shape)
            for name, shape in expected.items()
            if name in dtypes or name not in optional
        ]
        store.set("tables", zlib.compress(json.dumps(tables).encode(), 1))  # type: ignore[arg-type]
        needed = await self._needs_of_servers(store)
        numbers = {name: i for i, (name, _, _) in enumerate(tables)}
        self.layouts = [
            _layout([(numbers[name], box) for name, _, *box in parts if name in numbers])
            for parts in trainer_parts
        ]
        sized = [_table(name, dtype, shape) for name, dtype, shape in tables]
        _check_sizes(sized, self.layouts)
        plan = await asyncio.to_thread(self._new_plan, sized, needed)
        for rank, part in plan.parts().items():
            store.set(f"plan.{rank}", part.packed())  # type: ignore[arg-type] # torch's stubs know no bytes
        self.plan = plan

    async def _parts_of_trainer(self, own: OwnWeights, store: dist.Store) -> list[list[Any]]:
        """The parts of tensors that each rank of the trainer has, as it writes them to the group's store."""
        assert self._sender is not None
        orders = [SendLayout()] * len(self._relays)
        await asyncio.to_thread(self._relays.ask, orders, "to send their layouts")
        self._sender.send_layout(own)
        return [read_packed(store, f"held.{rank}") for rank in range(self._trainers)]

    async def _needs_of_servers(self, store: dist.Store) -> list[list[Layout]]:
        """The layouts of each server's ranks, which read the tables and write these to the group's store."""
        posts = self._start(
            lambda handle: self._receiver(handle.server).read_layout(
                self._rendezvous, self._offset(handle), self._timeout
            )
        )
        await asyncio.wait(posts)
        self._raise_failed(posts)
        written = [store.get(f"needs.{rank}") for rank in range(self._trainers, self._rendezvous.world_size)]
        # Ranks with the same layout, such as those of many servers, write the same bytes. Each is read once.
        distinct = {needs: _needs(needs) for needs in set(written)}
        firsts = [self._offset(handle) - self._trainers for handle in self._handles]
        return [
            [distinct[needs] for needs in written[first:last]]
            for first, last in pairwise([*firsts, len(written)])
        ]

    async def _all_at_once(self, own: OwnWeights) -> None:
        """Servers receive while the trainer's ranks send.

        If one of these ranks or servers fails, all stop.
        """
        assert self._group is not None and self._sender is not None
        store = self._group.membership().store
        posts = self._start(lambda handle: self._receiver(handle.server).receive_shards(self._timeout))
        orders = [Send()] * len(self._relays)
        sends = [
            asyncio.create_task(asyncio.to_thread(self._sender.send, own)),
            asyncio.create_task(asyncio.to_thread(self._relays.ask, orders, "to send their shards")),
        ]
        waiting: set[asyncio.Task[Any]] = {*posts, *sends}
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in done if task.exception() is not None]
        if not failed:
            self._raise_reported(store)
            return
        store.set(STOP, "1")
        # A server that refused to receive leaves the group, which ends the waits of all ranks that send to
        # it.
        leaves = self._start(lambda handle: self._receiver(handle.server).leave(self._rendezvous, LEAVE))
        await asyncio.gather(*leaves, return_exceptions=True)
        await asyncio.wait([*sends, *posts], timeout=self._timeout)
        for task in posts:
            task.cancel()
        self._raise_failed({task: m for task, m in posts.items() if task.done() and not task.cancelled()})
        self._raise_reported(store)
        problem = failed[0].exception()
        # RuntimeError is torch's, for a dead rank.
        if isinstance(problem, RuntimeError | Stopped | PushFailed):
            raise PushFailed(f"a sharded push failed: {problem}", self._handles) from None
        assert problem is not None
        raise problem

    def _raise_reported(self, store: dist.Store) -> None:
        """Raise PushFailed for the servers of which a rank has reported a failure in the group's store."""
        failed: dict[str, str] = {}  # problem, by url
        for rank in range(self._trainers, self._rendezvous.world_size):
            if store.check([f"failed.{rank}"]):
                [*_, url] = [url for url, first in self._offsets.items() if first <= rank]
                failed[url] = f"{url}: {store.get(f'failed.{rank}').decode()}"
        if failed:
            handles = [handle for handle in self._handles if handle.server.url in failed]
            raise PushFailed("; ".join(failed.values()), handles)

    async def _discard(self) -> None:
        if self._group is not None:
            # This runs in a thread, because another thread may block the connection to the store while it
            # waits for answers.
            await asyncio.to_thread(self._relays.tell, Leave())
        self._sender, self.plan = None, None
        await super()._discard()

    def _counts(self, member: Membership) -> Counter[tuple[int, int]]:
        """The bytes over each link, counted at both ends. Raises ValueError if the counts differ."""
        ends: dict[str, set[int]] = {}
        for rank in range(self._rendezvous.world_size):
            for link, size in json.loads(member.store.get(f"counted.{rank}")).items():
                ends.setdefault(link, set()).add(size)
        counted: Counter[tuple[int, int]] = Counter()
        for link, sizes in ends.items():
            source, target = map(int, link.split("-"))
            [counted[source, target]] = sizes
        return counted

    @property
    def _rendezvous(self) -> Rendezvous:
        assert self._group is not None
        return self._group.rendezvous


class ShardFollower(Follower):
    """The part of the other trainer ranks, which carry out rank 0's orders."""

    def __init__(
        self,
        orders: Orders[Order],
        dtype: torch.dtype,
        timeout: float,
        new_sender: Callable[[Membership, torch.dtype, float, Callable[[], bool]], Sender],
    ) -> None:
        self._orders = orders
        self._dtype = dtype
        self._timeout = timeout
        self._new_sender = new_sender
        self._sender: Sender | None = None

    def follow_own(self, own: OwnWeights) -> None:
        """Take part in one push, to its end. Raises RuntimeError if rank 0 falls silent."""
        while (order := self._orders.next()) != EndPush():
            if order == Leave():
                self._leave()
                continue
            try:
                self._carry_out(order, own)
            except (RuntimeError, Stopped, PushFailed) as error:  # RuntimeError is torch's, for a dead rank
                self._leave()
                self._orders.answer(Failed(str(error)))
            else:
                self._orders.answer(Done())

    def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _carry_out(self, order: Order, own: OwnWeights) -> None:
        if isinstance(order, Rendezvous):
            self._leave()
            member = join(order, dist.get_rank(), min(60.0, self._timeout), self._timeout)
            self._sender = self._new_sender(
                member, self._dtype, self._timeout, lambda: member.store.check([STOP])
            )
            return
        assert self._sender is not None, "not joined"
        match order:
            case SendLayout():
                self._sender.send_layout(own)
            case Send():
                self._sender.send(own)
            case _:
                raise AssertionError(f"rank 0 has ordered {order} to be answered")


def run_store(name: str) -> dist.Store:
    """The part of the store where the trainer's ranks have met, for the orders of a run's pushes."""
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def read_packed(store: dist.Store, key: str) -> Any:
    """Compressed JSON from a group's store."""
    return json.loads(zlib.decompress(store.get(key)))


def _layout(parts: Sequence[tuple[int, Sequence[int]]]) -> Layout:
    layout: dict[int, list[Box]] = {}
    for number, box in parts:
        layout.setdefault(number, []).append(Box(*box))
    return layout


def _check_sizes(tables: Sequence[Table], layouts: Sequence[Layout]) -> None:
    """Raise ValueError for a tensor that is larger at the trainer than at the servers."""
    for number, box in ((n, box) for layout in layouts for n, boxes in layout.items() for box in boxes):
        table = tables[number]
        if box.bottom > table.rows or box.right > table.columns:
            raise ValueError(
                f"{table.name}: the trainer holds rows up to {box.bottom}, columns up to {box.right}, and it "
                f"has {table.rows} x {table.columns} on the servers"
            )


def _needs(packed: bytes) -> Layout:
    return {number: [Box(*box) for box in boxes] for number, boxes in json.loads(zlib.decompress(packed))}


def _table(name: str, dtype: str, shape: Sequence[int]) -> Table:
    size = torch.Size(shape)
    rows = shape[0] if shape else 1
    return Table(name, rows, size.numel() // max(1, rows), getattr(torch, dtype).itemsize)


# A trainer rank's side of a sharded push: the rank reads the parts that it sends from its own weights.

POLL = 0.001  # seconds between two checks of a message
STOP_POLL = 0.05  # seconds between two checks whether the push has failed elsewhere
AHEAD = 2  # rounds that are sent at the same time


class Stopped(Exception):  # noqa: N818 - an outcome that the transport deals with
    """The push failed at another rank or server, or a message took too long."""


class Sender:
    """Sends one rank's parts over one group, in every push.

    `stopped` returns true if the push has failed elsewhere.
    """

    def __init__(
        self, member: Membership, dtype: torch.dtype, timeout: float, stopped: Callable[[], bool]
    ) -> None:
        self._member = member
        self._dtype = dtype
        self._timeout = timeout
        self._stopped = stopped
        self._rounds: list[list[Message]] | None = None
        self._parts: dict[int, list[OwnPart]] = {}  # own parts, by number of the tensor
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def send_layout(self, own: OwnWeights) -> None:
        """Tell rank 0 which parts of which tensors this rank holds, and their dtypes."""
        parts = [[p.name, self._wire(own, p), p.top, p.bottom, p.left, p.right] for p in own.parts]
        packed: Any = zlib.compress(json.dumps(parts).encode(), 1)  # torch's stubs want a str
        self._member.store.set(f"held.{self._member.rank}", packed)

    def send(self, own: OwnWeights) -> None:
        """Send this rank's part of a push. Raises Stopped, and torch's RuntimeError if a server has died."""
        if self._rounds is None:
            self._connect(own)
        assert self._rounds is not None
        counted: Counter[str] = Counter()
        under_way: list[list[Any]] = []
        for number, messages in enumerate(self._rounds):
            while len(under_way) >= AHEAD:
                self._wait(under_way.pop(0))
            wires = [(message.target, self._fill(own, message, number % AHEAD)) for message in messages]
            under_way.append(exchange(self._member.group, wires))
            for target, wire in wires:
                counted[f"{self._member.rank}-{target}"] += len(wire)
        for works in under_way:
            self._wait(works)
        self._member.store.set(f"counted.{self._member.rank}", json.dumps(counted))

    def close(self) -> None:
        """Leave the group. Ranks that still wait for data of this rank get an error."""
        self._member.group.abort()

    def _connect(self, own: OwnWeights) -> None:
        """Read this rank's part of the plan, and let NCCL connect all ranks and this one with its targets."""
        self._rounds = self._read_plan(own)
        targets = {message.target for messages in self._rounds for message in messages}
        self._meet(own.tensors[0].device, targets, set())

    def _read_plan(self, own: OwnWeights) -> list[list[Message]]:
        """This rank's messages by round, from the group's store."""
        store, rank = self._member.store, self._member.rank
        tables = read_packed(store, "tables")
        numbers = {name: number for number, (name, _, _) in enumerate(tables)}
        for part in own.parts:
            self._parts.setdefault(numbers.get(part.name, -1), []).append(part)
        return unpack_part(store.get(f"plan.{rank}"), rank).sends

    def _meet(self, device: torch.device, targets: set[int], sources: set[int]) -> None:
        """Let NCCL connect all ranks, and this one with those to which it sends and from which it receives.

        It happens in a thread that this one does not wait for when the push has failed elsewhere. Gloo
        connects all ranks when they join.
        """
        if self._member.backend != "nccl":
            return

        def meet() -> None:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                self._member.group.broadcast([byte], dist.BroadcastOptions()).wait()
                outgoing = [(target, byte) for target in sorted(targets)]
                incoming = [(source, torch.empty_like(byte)) for source in sorted(sources)]
                for work in exchange(self._member.group, outgoing, incoming):
                    work.wait()
                if device.type == "cuda":
                    torch.cuda.current_stream().synchronize()

        self._until(Background(meet).is_completed, "the first message")

    def _wait(self, works: Sequence[Any]) -> None:
        """Wait until messages are sent.

        With Gloo a wait ends with an error when the other process ends or leaves the group, or after the
        group's timeout. With NCCL it may never end, so this rank asks whether the push has failed elsewhere.
        """
        for work in works:
            if self._member.backend == "nccl":
                self._until(work.is_completed, "a message")
            work.wait()

    def _until(self, is_done: Callable[[], bool], what: str) -> None:
        """Raises Stopped if the push has failed elsewhere, or after the timeout."""
        begin = last_check = time.monotonic()
        while not is_done():
            now = time.monotonic()
            if now - last_check > STOP_POLL:
                last_check = now
                if self._stopped():
                    raise Stopped("the push failed elsewhere")
            if now - begin > self._timeout:
                raise Stopped(f"{what} took over {self._timeout:g} s")
            time.sleep(POLL)

    def _fill(self, own: OwnWeights, message: Message, turn: int) -> Tensor:
        """Copy a message's parts, as uint8, into the buffer that this turn's messages to its target use."""
        views = [self._view(own, cell) for cell in message.cells]
        total, key = sum(v.numel() * self._wire_type(v).itemsize for v in views), (message.target, turn)
        if key not in self._buffers or len(self._buffers[key]) < total:
            self._buffers[key] = torch.empty(total, dtype=torch.uint8, device=views[0].device)
        wire = self._buffers[key][:total]
        self._copy(views, wire)
        return wire

    def _copy(self, views: Sequence[Tensor], wire: Tensor) -> None:
        """Copy parts, one after another, into `wire`, uint8 [bytes]."""
        wire_types = [self._wire_type(view) for view in views]
        slices = wire.split([v.numel() * t.itemsize for v, t in zip(views, wire_types, strict=True)])
        for view, kind, target in zip(views, wire_types, slices, strict=True):
            if target.storage_offset() % kind.itemsize:  # an element would lie between two addresses
                target.copy_(view.to(kind).contiguous().view(torch.uint8).view(-1))
            else:
                target.view(kind).view(view.shape).copy_(view)

    def _view(self, own: OwnWeights, cell: Cell) -> Tensor:
        top, bottom, left, right = cell.box
        for part in self._parts[cell.tensor]:
            if part.top <= top and bottom <= part.bottom and part.left <= left and right <= part.right:
                return own.read(part)[
                    top - part.top : bottom - part.top, left - part.left : right - part.left
                ]
        raise AssertionError(f"rank {self._member.rank} does not hold {cell}, and is to send it")

    def _wire(self, own: OwnWeights, part: OwnPart) -> str:
        return str(self._wire_type(own.tensors[part.source])).removeprefix("torch.")

    def _wire_type(self, tensor: Tensor) -> torch.dtype:
        return sent_as(tensor.dtype, self._dtype)
