"""Plans a sharded push: which rank sends which part of which tensor to which rank.

The plan depends only on the layouts of the trainer and of the servers.

Every tensor is a table of rows and columns (a vector has one column; further dimensions are columns), and a
layout says which boxes of it a rank holds. The plan cuts the tensors along the edges of all boxes. Each of
these cells is sent by one trainer rank that holds it to the first server rank that needs it. A chain passes
it on from server to server, and inside a server to its other ranks that need it, so that a trainer rank
sends every cell once, however many servers there are.

Cells are sent in rounds of at most `limit` bytes for a rank. In each round a server rank passes on the cells
of the round before, while it receives the next cells. All that a rank sends another in one round is one
message, and all that a rank sends and receives in one round is one operation of its GPU. All ranks go through
the rounds in the same order, so they never wait for each other in a circle.

Each server rank receives from few trainer ranks, because NCCL needs buffers on both GPUs for every pair of
ranks that exchange messages.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

ROUNDS = 8  # rounds for each link of the longest path, which then fills in 1/8 of the push
LEAST = 2**20  # smallest worthwhile size of a round, in bytes
# A trainer rank may exceed its share by this fraction of the mean, or by the largest cell, if that saves a
# link.
SLACK = 0.02


class Box(NamedTuple):
    """Rows `top` to `bottom` and columns `left` to `right` of a tensor, without the last ones."""

    top: int
    bottom: int
    left: int
    right: int

    def contains(self, other: Box) -> bool:
        rows = self.top <= other.top and other.bottom <= self.bottom
        return rows and self.left <= other.left and other.right <= self.right

    @property
    def elements(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


class Table(NamedTuple):
    """A tensor seen as a table; `itemsize` is the bytes of an element."""

    name: str
    rows: int
    columns: int
    itemsize: int


class Cell(NamedTuple):
    """A box of the tensor that has the number `tensor`."""

    tensor: int
    box: Box


Layout = Mapping[int, Sequence[Box]]  # the boxes that a rank holds, by the number of the tensor


class Parcel(NamedTuple):
    """A cell on its way: from the trainer rank `owner` to its first receiver, and on over `route`."""

    cell: Cell
    nbytes: int
    owner: int
    first: int
    route: tuple[tuple[int, int], ...]
    round: int  # the round in which the owner sends the cell

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        return ((self.owner, self.first), *self.route)

    @property
    def rounds(self) -> list[int]:
        """The round of each of `links`."""
        return [self.round, *(self.round + hop for hop in _hops(self.first, self.route))]


@dataclass(frozen=True)
class Message:
    """The cells that go from one rank to another in a round, in this order."""

    source: int
    target: int
    cells: list[Cell]


@dataclass(frozen=True)
class Part:
    """One rank's part in a push, by round."""

    receives: list[list[Message]]
    sends: list[list[Message]]

    def packed(self) -> bytes:
        """Return the part as compressed JSON, for the group's store.

        The servers' plugin megatron_gvpo_shards reads this form.
        """
        receives = [[[m.source, _listed(m.cells)] for m in messages] for messages in self.receives]
        sends = [[[m.target, _listed(m.cells)] for m in messages] for messages in self.sends]
        return zlib.compress(json.dumps({"receives": receives, "sends": sends}).encode(), 1)


def unpack_part(packed: bytes, rank: int) -> Part:
    """Return the part of `rank`, read from the group's store."""

    def cells(listed: Sequence[Sequence[int]]) -> list[Cell]:
        return [Cell(tensor, Box(*box)) for tensor, *box in listed]

    part = json.loads(zlib.decompress(packed))
    return Part(
        [[Message(source, rank, cells(c)) for source, c in messages] for messages in part["receives"]],
        [[Message(rank, target, cells(c)) for target, c in messages] for messages in part["sends"]],
    )


@dataclass(frozen=True)
class PushPlan:
    """Ranks 0 to `trainers` - 1 are the trainer's; the servers' follow."""

    tables: list[Table]
    trainers: int
    world: int
    parcels: list[Parcel]
    rounds: int

    def link_bytes(self) -> Counter[tuple[int, int]]:
        """The bytes that go over each link (from rank, to rank) in one push."""
        links: Counter[tuple[int, int]] = Counter()
        for parcel in self.parcels:
            for link in parcel.links:
                links[link] += parcel.nbytes
        return links

    def sent_bytes(self) -> Counter[int]:
        """The bytes that each rank sends in one push."""
        sent: Counter[int] = Counter()
        for (source, _), size in self.link_bytes().items():
            sent[source] += size
        return sent

    def parts(self) -> dict[int, Part]:
        """The messages of each rank."""
        messages: dict[tuple[int, int, int], list[Cell]] = defaultdict(list)
        for parcel in self.parcels:
            for number, (source, target) in zip(parcel.rounds, parcel.links, strict=True):
                messages[number, source, target].append(parcel.cell)
        parts = {
            rank: Part([[] for _ in range(self.rounds)], [[] for _ in range(self.rounds)])
            for rank in range(self.world)
        }
        for (number, source, target), cells in sorted(messages.items()):
            message = Message(source, target, cells)
            parts[source].sends[number].append(message)
            parts[target].receives[number].append(message)
        return parts


def plan_push(
    tables: Sequence[Table],
    sources: Sequence[Layout],
    needed: Sequence[Sequence[Layout]],
    limit: int,
    seats: Sequence[tuple[int, int]] | None = None,
) -> PushPlan:
    """Plan a push of `tables` from trainer ranks that hold `sources` to servers whose ranks need `needed`.

    `limit`: bytes that a trainer rank sends, and that a server rank gets from the trainer, in one round at
    most. The ranks that hold the same cells share them evenly. `seats`: the GPU and the machine of every
    rank, the trainer's first. With seats, server ranks pass nothing on, and each gets every cell from the
    nearest trainer ranks that hold it. Raises ValueError for a part that a server needs and no trainer rank
    holds.
    """
    trainers = len(sources)
    ranks = [layout for server in needed for layout in server]
    path = len(needed) + _longest(needed) if seats is None else 1
    limit = min(limit, max(LEAST, _most(tables, sources, ranks) // (ROUNDS * path)))
    loads = list(_loads(tables, sources, ranks, limit))
    if seats is not None:
        nearest = cache(partial(_nearest, seats))
        loads = [
            load._replace(holders=nearest(load.holders, rank), receivers=(rank,))
            for load in loads
            for rank in load.receivers
        ]
    servers = tuple(number for number, server in enumerate(needed) for _ in server)
    owners = _owners(loads, trainers)
    parcels = [
        Parcel(
            load.cell,
            load.nbytes,
            owner,
            load.receivers[0],
            _route(load.receivers, servers, trainers),
            number,
        )
        for load, owner, number in zip(loads, owners, _rounds(loads, owners, limit), strict=True)
    ]
    last = max((max(parcel.rounds) for parcel in parcels), default=-1)
    return PushPlan(list(tables), trainers, trainers + len(ranks), parcels, last + 1)


class _Load(NamedTuple):
    """A cell that is to be sent, before its owner is chosen among the trainer ranks that hold it."""

    cell: Cell
    nbytes: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


def _loads(
    tables: Sequence[Table], sources: Sequence[Layout], ranks: Sequence[Layout], limit: int
) -> Iterator[_Load]:
    """The cells that server ranks need, of at most `limit` bytes each. Raises ValueError as `plan_push`."""
    stored, needed = _by_box(sources, 0), _by_box(ranks, len(sources))
    for number, table in enumerate(tables):
        stored_boxes, needed_boxes = stored.get(number, {}), needed.get(number, {})
        for box, around, takers in _cells(table[1:], tuple(stored_boxes), tuple(needed_boxes), limit):
            holders = _union([stored_boxes[other] for other in around])
            if not holders:
                raise ValueError(
                    f"{table.name}: servers need rows {box.top} to {box.bottom - 1}, columns {box.left} to "
                    f"{box.right - 1}, and no rank of the trainer holds them"
                )
            receivers = _union([needed_boxes[other] for other in takers])
            yield _Load(Cell(number, box), box.elements * table.itemsize, holders, receivers)


def _owners(loads: Sequence[_Load], ranks: int) -> list[int]:
    """The trainer rank that sends each cell.

    Ranks that hold the same cells send equal amounts, as far as other cells allow it, and each of them sends
    to as few receivers as possible. Cells with the fewest holders choose first.
    """
    # The cells of ranks that hold the same cells, by their first receiver.
    shared: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, load in enumerate(loads):
        shared[load.holders][load.receivers[0]].append(index)
    sent = [0] * ranks
    links: set[tuple[int, int]] = set()
    sizes = [load.nbytes for load in loads]
    slack = max([SLACK * sum(sizes) / ranks, *sizes])
    owners = [0] * len(loads)
    for holders in sorted(shared, key=len):
        totals = {target: sum(sizes[i] for i in indices) for target, indices in shared[holders].items()}
        level = _level([sent[rank] for rank in holders], sum(totals.values()))
        for target, indices in shared[holders].items():
            linked = [rank for rank in holders if (rank, target) in links]
            shares = _shares(holders, linked, totals[target], sent, level, slack)
            chosen = _interleaved([sizes[i] for i in indices], shares)
            for index, rank in zip(indices, chosen, strict=True):
                owners[index] = rank
                sent[rank] += sizes[index]
            links |= {(owners[index], target) for index in indices}
    return owners


def _level(loads: Sequence[float], more: float) -> float:
    """The load of the least loaded ranks after `more` is distributed so that their loads become equal."""
    before = sorted(loads)
    total = more
    for count, load in enumerate(before):
        if count and total / count <= load:
            return total / count
        total += load
    return total / len(before)


def _shares(
    owners: Sequence[int],
    linked: Sequence[int],
    size: int,
    load: Sequence[float],
    level: float,
    slack: float,
) -> dict[int, float]:
    """The bytes that each owner sends to one receiver, which gets `size` bytes: few owners send all they can.

    Owners that already send to this receiver come first, then owners that already send to another, so that
    the others stay free. An owner may exceed `level` by `slack` where that saves a link.
    """
    room = {rank: level - load[rank] for rank in owners}

    def order(rank: int) -> tuple[bool, bool, float]:
        is_full = room[rank] < slack
        return rank not in linked, is_full, -room[rank] if is_full or rank in linked else room[rank]

    shares: dict[int, float] = {}
    remaining = float(size)
    for rank in sorted(owners, key=order):
        most = room[rank] + slack
        may_send = (most if rank in linked else room[rank]) > 0
        if remaining <= 0 or not may_send:
            continue
        if remaining <= most:  # with the slack, this owner sends the rest, and no other needs a link
            shares[rank] = remaining
        elif room[rank] > 0:
            shares[rank] = room[rank]
        else:  # the owner is full, and has a link already, so that its slack costs none
            shares[rank] = most
        remaining -= shares[rank]
    if remaining > 0:  # some bytes remain because of rounding
        rank = next(iter(shares), min(owners, key=lambda rank: load[rank]))
        shares[rank] = shares.get(rank, 0.0) + remaining
    return shares


def _interleaved(sizes: Sequence[int], shares: Mapping[int, float]) -> Iterator[int]:
    """The owner of each of a receiver's cells, in order, such that all owners progress equally.

    So all parts of a layer arrive at about the same time, and few layers are incomplete at once.
    """
    if len(shares) == 1:
        yield from list(shares) * len(sizes)
        return
    due = dict.fromkeys(shares, 0.0)
    total = sum(shares.values())
    for size in sizes:
        for rank, share in shares.items():
            due[rank] += size * share / total
        chosen = max(due, key=due.__getitem__)
        due[chosen] -= size
        yield chosen


def _nearest(seats: Sequence[tuple[int, int]], owners: tuple[int, ...], receiver: int) -> tuple[int, ...]:
    """The owners on the receiver's GPU; if there are none, those on its machine; or else all."""
    for level in range(2):
        near = tuple(rank for rank in owners if seats[rank][level] == seats[receiver][level])
        if near:
            return near
    return owners


def _by_box(layouts: Sequence[Layout], first: int) -> dict[int, dict[Box, tuple[int, ...]]]:
    """The ranks, counted from `first`, that hold each box of each tensor."""
    # Ranks that share a layout, such as those of many servers.
    ranks_of_layout: dict[int, list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts, first):
        ranks_of_layout[id(layout)].append(rank)
    by_tensor: dict[int, dict[Box, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    for ranks in map(tuple, ranks_of_layout.values()):
        for number, boxes in layouts[ranks[0] - first].items():
            for box in boxes:
                by_tensor[number][box].append(ranks)
    # Each box is computed once, because hundreds of data-parallel ranks hold equal boxes.
    return {
        number: {box: _union(holders) for box, holders in boxes.items()}
        for number, boxes in by_tensor.items()
    }


def _rounds(loads: Sequence[_Load], owners: Sequence[int], limit: int) -> list[int]:
    """The round in which each owner sends its cell. All owners are done at about the same time."""
    total: Counter[int] = Counter()
    before: list[int] = []  # the bytes of the owner's earlier cells
    for load, owner in zip(loads, owners, strict=True):
        before.append(total[owner])
        total[owner] += load.nbytes
    rounds = [0] * len(loads)
    latest: dict[int, int] = defaultdict(int)  # the round of each rank's latest cell
    filled: Counter[tuple[int, int]] = Counter()  # bytes by (rank, round)
    for index in sorted(range(len(loads)), key=lambda i: before[i] / total[owners[i]]):
        size, ends = loads[index].nbytes, (owners[index], loads[index].receivers[0])
        number = max(latest[rank] for rank in ends)
        fuller = max(filled[rank, number] for rank in ends)
        if fuller and fuller + size > limit:
            number += 1
        for rank in ends:
            latest[rank] = number
            filled[rank, number] += size
        rounds[index] = number
    return rounds


@lru_cache(maxsize=4096)
def _hops(first: int, route: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """For each link of a route, the rounds after the first receiver got the cell: each rank adds one."""
    hops = {first: 0}
    for source, target in route:
        hops[target] = hops[source] + 1
    return tuple(hops[target] for _, target in route)


@lru_cache(maxsize=4096)
def _route(
    receivers: tuple[int, ...], servers: tuple[int, ...], trainers: int
) -> tuple[tuple[int, int], ...]:
    """The links from a cell's first receiver to the others.

    A chain goes through the first receiver of each server, and from there another through the others of it.
    """
    links: list[tuple[int, int]] = []
    first = before = receivers[0]
    for rank in receivers[1:]:
        if servers[rank - trainers] == servers[first - trainers]:
            links.append((before, rank))
        else:
            links.append((first, rank))
            first = rank
        before = rank
    return tuple(links)


def _most(tables: Sequence[Table], sources: Sequence[Layout], ranks: Sequence[Layout]) -> int:
    """An estimate of the bytes of the rank that sends or receives the most."""
    different = {id(layout): layout for layout in ranks}.values()
    gets = (
        sum(box.elements * tables[number].itemsize for number, boxes in layout.items() for box in boxes)
        for layout in different
    )
    total = sum(table.rows * table.columns * table.itemsize for table in tables)
    return max([total // len(sources), *gets])


def _longest(needed: Sequence[Sequence[Layout]]) -> int:
    return max(map(len, needed), default=1)


@lru_cache(maxsize=4096)  # many tensors of a model are cut alike
def _cells(
    size: tuple[int, int, int], sources: tuple[Box, ...], needed: tuple[Box, ...], limit: int
) -> list[tuple[Box, tuple[Box, ...], tuple[Box, ...]]]:
    """(cell, the boxes in `sources` around it, those in `needed`) for every part of a tensor that is needed.

    `size`: rows, columns, bytes of an element. A cell has at most `limit` bytes, or one row.
    """
    _, _, itemsize = size
    rows = sorted({edge for box in (*sources, *needed) for edge in (box.top, box.bottom)})
    columns = sorted({edge for box in (*sources, *needed) for edge in (box.left, box.right)})
    cells = []
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            cell = Box(top, bottom, left, right)
            takers = tuple(box for box in needed if box.contains(cell))
            if not takers:
                continue
            holders = tuple(box for box in sources if box.contains(cell))
            step = max(1, limit // ((right - left) * itemsize))
            for start in range(top, bottom, step):
                cells.append((Box(start, min(bottom, start + step), left, right), holders, takers))
    return cells


def _listed(cells: Iterable[Cell]) -> list[list[int]]:
    return [[cell.tensor, *cell.box] for cell in cells]


def _union(ranks: list[tuple[int, ...]]) -> tuple[int, ...]:
    return ranks[0] if len(ranks) == 1 else tuple(sorted({rank for some in ranks for rank in some}))
