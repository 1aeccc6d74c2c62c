"""A sharded push as data: every server rank gets all that it holds, once, and no rank sends too much."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import pytest
from helpers.pushes.fair_shares import fair_shares
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.weights.shard_plan import SLACK, Box, Layout, PushPlan, Table, plan_push


def full_box(table: Table) -> Box:
    return Box(0, table.rows, 0, table.columns)


def split(table: Table, parts: int, part: int, by_rows: bool) -> Box:
    """One of `parts` equal parts of a tensor."""
    if by_rows:
        return Box(table.rows * part // parts, table.rows * (part + 1) // parts, 0, table.columns)
    return Box(0, table.rows, table.columns * part // parts, table.columns * (part + 1) // parts)


def check(plan: PushPlan, sources: list[Layout], servers: list[list[Layout]], limit: int) -> None:
    """Follow every byte: owners hold what they send, relays pass on what came, receivers get all once."""
    needed = [layout for server in servers for layout in server]
    got: dict[int, Counter[tuple[int, int, int]]] = defaultdict(Counter)
    for parcel in plan.parcels:
        number, box = parcel.cell
        assert any(other.contains(box) for other in sources[parcel.owner][number])
        assert parcel.nbytes == box.elements * plan.tables[number].itemsize
        assert parcel.links[0] == (parcel.owner, parcel.first)
        for _, receiver in parcel.links:
            elements = ((number, r, c) for r in range(*box[:2]) for c in range(*box[2:]))
            got[receiver].update(elements)
    for rank, layout in enumerate(needed, plan.trainers):
        boxes = ((number, box) for number, boxes in layout.items() for box in boxes)
        elements = {(number, r, c) for number, box in boxes for r in range(*box[:2]) for c in range(*box[2:])}
        assert set(got[rank]) == elements and set(got[rank].values()) <= {1}
    parts = plan.parts()
    arrived: dict[int, set[tuple[int, Box]]] = defaultdict(set)
    for number in range(plan.rounds):
        for rank in range(plan.trainers, plan.world):  # a relay passes on what came in the round before
            for message in parts[rank].sends[number]:
                assert message.source == rank < message.target and set(message.cells) <= arrived[rank]
            arrived[rank] = {cell for message in parts[rank].receives[number] for cell in message.cells}
        for rank in range(plan.trainers):
            assert not parts[rank].receives[number]
            sizes = [
                b.elements * plan.tables[t].itemsize for m in parts[rank].sends[number] for t, b in m.cells
            ]
            assert sum(sizes) <= limit or len(sizes) == 1
    links = plan.link_bytes()
    assert links.total() == sum(parcel.nbytes * len(parcel.links) for parcel in plan.parcels)


def in_trainer(tables: list[Table], tp: int, pp: int, dp: int) -> list[Layout]:
    """Ranks in Megatron's order; even tensors are split by rows, odd ones by columns, each fifth is not."""
    ranks = []
    for stage in range(pp):
        for _ in range(dp):
            for part in range(tp):
                layout = {}
                for i, table in enumerate(tables):
                    if i * pp // len(tables) == stage:
                        layout[i] = [full_box(table) if i % 5 == 4 else split(table, tp, part, i % 2 == 0)]
                ranks.append(layout)
    return ranks


def in_servers(tables: list[Table], servers: list[int]) -> list[list[Layout]]:
    """Servers of so many ranks; splits differ from the trainer's for every third tensor."""
    return [
        [
            {
                i: [full_box(table) if i % 5 == 4 else split(table, tp, part, i % 2 == 0 or i % 3 == 0)]
                for i, table in enumerate(tables)
            }
            for part in range(tp)
        ]
        for tp in servers
    ]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=12),
    trainer=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    servers=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    limit=st.integers(4, 200),
)
@settings(max_examples=80, deadline=None)
def test_every_byte_reaches_every_rank_that_holds_it_once(sizes, trainer, servers, limit):
    tables = [Table(f"t{i}", rows, columns, 2 + 2 * (i % 2)) for i, (rows, columns) in enumerate(sizes)]
    sources, needed = in_trainer(tables, *trainer), in_servers(tables, servers)
    plan = plan_push(tables, sources, needed, limit)
    check(plan, sources, needed, limit)
    largest = max(parcel.nbytes for parcel in plan.parcels)
    slack = max(largest, SLACK * sum(parcel.nbytes for parcel in plan.parcels) / plan.trainers)
    for rank, share in enumerate(fair_shares(plan, sources)):
        assert plan.sent_bytes()[rank] <= share + largest + slack


def test_two_servers_cost_the_trainer_no_more_than_one():
    """TP2 x PP2 trainers to servers of two ranks: the first server passes all on to the second."""
    tables = [Table(f"t{i}", 64, 32, 4) for i in range(10)]
    sources = in_trainer(tables, 2, 2, 1)
    total = sum(table.rows * table.columns * table.itemsize for table in tables)
    replicated = 2 * 64 * 32 * 4  # two of the ten tensors, which both ranks of a server hold
    one, two = (plan_push(tables, sources, in_servers(tables, [2] * n), 1000) for n in (1, 2))
    for plan in (one, two):
        sent = plan.sent_bytes()
        assert sum(sent[rank] for rank in range(4)) == total
        assert max(sent[rank] for rank in range(4)) <= total / 4 + 1000
    assert sum(two.sent_bytes().values()) == 2 * (total + replicated)


def test_two_thousand_ranks_that_hold_the_same_are_planned_in_a_second():
    """The old code sorted the ranks so far once more for every rank that holds a box: 20 times as long."""
    tables = [Table(str(number), 8, 8, 2) for number in range(50)]
    sources = [{number: [full_box(table)] for number, table in enumerate(tables)} for _ in range(2000)]
    begin = time.process_time()
    plan = plan_push(tables, sources, in_servers(tables, [1]), 2**20)
    seconds = time.process_time() - begin
    assert sum(plan.sent_bytes().values()) == 50 * 128
    assert seconds < 2, seconds


def test_a_part_that_nobody_holds_is_named():
    tables = [Table("a", 4, 1, 2), Table("w", 8, 6, 2)]
    sources = [{0: [full_box(tables[0])], 1: [Box(0, 4, 0, 6)]}]
    with pytest.raises(ValueError, match=r"^w: servers need rows 4 to 7, columns 0 to 5, and no rank"):
        plan_push(tables, sources, [[{1: [Box(0, 8, 0, 6)]}]], 100)


def deepseek(layers: int = 61, dense: int = 3, experts: int = 256) -> list[tuple[Table, str]]:
    """DeepSeek-V3's tensors (671B parameters), and how each is split: by rows, by columns or not."""
    hidden, heads = 7168, 128
    tensors = [(Table("embed", 129280, hidden, 2), "rows")]
    for i in range(layers):
        tensors += [(Table(f"{i}.q_a", 1536, hidden, 2), "no"), (Table(f"{i}.kv_a", 576, hidden, 2), "no")]
        tensors += [
            (Table(f"{i}.q_b", heads * 192, 1536, 2), "rows"),
            (Table(f"{i}.norms", 2 * hidden + 2048, 1, 2), "no"),
        ]
        tensors += [
            (Table(f"{i}.kv_b", heads * 256, 512, 2), "rows"),
            (Table(f"{i}.o", hidden, heads * 128, 2), "columns"),
        ]
        ffn = (
            [("mlp", 18432)]
            if i < dense
            else [("shared", 2048), *((f"experts.{e}", 2048) for e in range(experts))]
        )
        for name, width in ffn:
            tensors += [(Table(f"{i}.{name}.{part}", width, hidden, 2), "rows") for part in ("gate", "up")]
            tensors.append((Table(f"{i}.{name}.down", hidden, width, 2), "columns"))
        if i >= dense:
            tensors.append((Table(f"{i}.router", experts, hidden, 2), "no"))
    return [*tensors, (Table("head", 129280, hidden, 2), "rows")]


@pytest.mark.parametrize("layers", [5, pytest.param(61, marks=pytest.mark.proof)])
def test_a_plan_for_671b_takes_seconds(layers: int):
    """Trainers of pp16 (or fewer stages) and ep16 to four servers of 32 ranks: each rank sends its share."""
    model = deepseek(layers)
    tables = [table for table, _ in model]
    stages = min(16, layers)
    sources: list[dict[int, list[Box]]] = [{} for _ in range(16 * stages)]
    needed: list[dict[int, list[Box]]] = [{} for _ in range(32)]
    for i, (table, kind) in enumerate(model):
        head, *parts = table.name.split(".")
        stage = int(head) * stages // layers if head.isdigit() else {"embed": 0, "head": stages - 1}[head]
        owners = [int(parts[1]) // 16] if parts[:1] == ["experts"] else list(range(16))
        for rank in owners:
            sources[16 * stage + rank][i] = [full_box(table)]
        for rank, layout in enumerate(needed):
            layout[i] = [full_box(table) if kind == "no" else split(table, 32, rank, kind == "rows")]
    begin = time.process_time()
    plan = plan_push(tables, sources, 4 * [needed], 256 * 2**20)
    seconds = time.process_time() - begin
    sent, total = plan.sent_bytes(), sum(table.rows * table.columns * 2 for table in tables)
    assert sum(sent[rank] for rank in range(len(sources))) == total
    shares = fair_shares(plan, sources)
    assert max(sent[rank] - shares[rank] for rank in range(len(sources))) <= 256 * 2**20
    assert seconds < 60, f"{seconds:.1f} s of CPU time"
    print(f"{total / 2e9:.0f}B: {len(plan.parcels)} cells, {plan.rounds} rounds, planned in {seconds:.1f} s")


def transformer(
    layers: int, hidden: int, q: int, kv: int, ffn: int, experts: int = 0
) -> list[tuple[Table, str]]:
    """The tensors of a dense model or of a mixture of `experts`, and how each is split."""
    tensors = [(Table("embed", 151936, hidden, 2), "rows")]
    for i in range(layers):
        tensors += [
            (Table(f"{i}.{name}", size, hidden, 2), "rows") for name, size in (("q", q), ("k", kv), ("v", kv))
        ]
        tensors += [(Table(f"{i}.o", hidden, q, 2), "columns"), (Table(f"{i}.norms", hidden, 2, 2), "no")]
        if experts:
            tensors.append((Table(f"{i}.router", experts, hidden, 2), "no"))
        for name in [f"experts.{e}." for e in range(experts)] or [""]:
            tensors += [(Table(f"{i}.{name}{part}", ffn, hidden, 2), "rows") for part in ("gate", "up")]
            tensors.append((Table(f"{i}.{name}down", hidden, ffn, 2), "columns"))
    return [*tensors, (Table("head", 151936, hidden, 2), "rows")]


def in_megatron(
    model: list[tuple[Table, str]], layers: int, tp: int, pp: int, dp: int, ep: int = 1, experts: int = 0
) -> list[Layout]:
    """The trainer's ranks; experts are divided among `ep` ranks of tp x dp, each of which has them whole."""
    ranks: list[Layout] = []
    for stage in range(pp):
        for rank in range(tp * dp):
            layout: dict[int, list[Box]] = {}
            for i, (table, kind) in enumerate(model):
                head, *rest = table.name.split(".")
                at = int(head) * pp // layers if head.isdigit() else {"embed": 0, "head": pp - 1}[head]
                if at != stage or (rest[:1] == ["experts"] and int(rest[1]) * ep // experts != rank % ep):
                    continue
                is_whole = kind == "no" or rest[:1] == ["experts"]
                layout[i] = [full_box(table) if is_whole else split(table, tp, rank % tp, kind == "rows")]
            ranks.append(layout)
    return ranks


# Layouts of runs: the model, the trainer's ranks, servers and their ranks, and the most links of a trainer's
# and of a server's rank. A server's rank needs a part of every expert, so it gets from all that hold others:
# pp x ep ranks at least.
DENSE_7B = (28, 3584, 3584, 512, 18944)
LINKS = [
    pytest.param(DENSE_7B, {"tp": 2, "pp": 1, "dp": 4}, (8, 1), 1, 9, id="7B, tp2 dp4 to 8 x tp1"),
    pytest.param(DENSE_7B, {"tp": 2, "pp": 1, "dp": 4}, (1, 8), 1, 3, id="7B, tp2 dp4 to tp8"),
    pytest.param(DENSE_7B, {"tp": 1, "pp": 1, "dp": 64}, (4, 8), 2, 16, id="7B, dp64 to 4 x tp8"),
    pytest.param(
        (12, 2048, 4096, 512, 768, 128),
        {"tp": 2, "pp": 1, "dp": 8, "ep": 8},
        (2, 4),
        4,
        16,
        id="30B-A3B, tp2 ep8 to 2 x tp4",
    ),
    pytest.param(
        (8, 4096, 8192, 512, 1536, 128),
        {"tp": 4, "pp": 4, "dp": 4, "ep": 8},
        (4, 8),
        5,
        38,
        id="235B, tp4 pp4 ep8 to 4 x tp8",
    ),
]


@pytest.mark.parametrize(("sizes", "ranks", "servers", "of_trainer", "of_server"), LINKS)
def test_a_rank_has_few_links(sizes, ranks, servers, of_trainer, of_server):
    """Each link takes buffers of NCCL's on both GPUs; with the layouts here a rank had up to 55."""
    model, count = transformer(*sizes), dict(zip(("layers", "experts"), (sizes[0], *sizes[5:]), strict=False))
    tables = [table for table, _ in model]
    sources = in_megatron(model, **count, **ranks)
    number, tp = servers
    one = [
        {
            i: [full_box(t) if kind == "no" or tp == 1 else split(t, tp, r, kind == "rows")]
            for i, (t, kind) in enumerate(model)
        }
        for r in range(tp)
    ]
    plan = plan_push(tables, sources, number * [one], 256 * 2**20)
    links: Counter[int] = Counter(rank for link in plan.link_bytes() for rank in link)
    assert max(links[rank] for rank in range(plan.trainers)) <= of_trainer
    assert max(links[rank] for rank in range(plan.trainers, plan.world)) <= of_server
    shares, sent = fair_shares(plan, sources), plan.sent_bytes()
    assert max(sent[rank] - shares[rank] for rank in range(plan.trainers)) <= 0.15 * max(shares)
    messages = [
        len(part.sends[n]) + len(part.receives[n])
        for part in plan.parts().values()
        for n in range(plan.rounds)
    ]
    assert max(messages) < 256, "operations in one group"
