"""Sharded pushes: what ranks hold, what loaders copy, and every byte on its way; without a server."""

from __future__ import annotations

import json
import queue
import sys
import threading
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import launch
from helpers.inputs import family_task, moe_task
from torch import Tensor

from megatron_gvpo.megatron.model.own_weights import OwnPart, OwnWeights
from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.weights.group import Membership
from megatron_gvpo.weights.shard_plan import Box, Table, plan_push
from megatron_gvpo.weights.sharded import STOP, Sender, Stopped

sys.path.insert(0, str(PLUGINS))

from megatron_gvpo_shards import Shards
from megatron_gvpo_slices import FullTensor, Slice

FULL = {
    "m.layers.0.self_attn.q": torch.randn(8, 6),
    "m.layers.0.self_attn.v": torch.randn(8, 6),
    "o": torch.randn(6, 8),
    "bias": torch.randn(8),
    "norm": torch.randn(6),
    "ignored": torch.randn(3, 3),
}


class Engine(torch.nn.Module):
    """A rank's model as engines have it: q and v are one parameter, and o is split by columns."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.part = part
        shapes = {"qv": (8, 6), "o": (6, 4), "bias": (4,), "norm": (6,)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.calls: list[set[str]] = []

    def load_weights(self, weights) -> None:
        self.calls.append({name for name, _ in weights})
        for name, tensor in weights:
            first = 4 * self.part
            if name[-1] in "qv" and "attn" in name:
                row = {"q": 0, "v": 4}[name[-1]]
                self.qv.data.narrow(0, row, 4).copy_(tensor.narrow(0, first, 4))
            elif name == "o":
                self.o.data.copy_(tensor[:, first : first + 4])
            elif name == "bias":
                self.bias.data.copy_(tensor.chunk(2)[self.part])
            elif name == "norm":
                assert self.norm.shape == tensor.shape and tensor.dtype == torch.float32
                self.norm.data.copy_(tensor)

    def expected(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = slice(4 * self.part, 4 * self.part + 4)
        qv = torch.cat([full[f"m.layers.0.self_attn.{x}"][rows] for x in "qv"])
        return {"qv": qv, "o": full["o"][:, rows], "bias": full["bias"][rows], "norm": full["norm"]}


def own_parts(rank: int, full: dict[str, Tensor]) -> OwnWeights:
    """The weights of one of two trainer ranks: q and v in one tensor, as Megatron has them."""
    q, v = (full[f"m.layers.0.self_attn.{x}"][4 * rank : 4 * rank + 4] for x in "qv")
    qv = torch.cat([q[:2], v[:2], q[2:], v[2:]])
    parts = []
    for head in range(2):
        for kind, x in enumerate("qv"):
            top, offset = 4 * rank + 2 * head, 6 * (4 * head + 2 * kind)
            parts.append(OwnPart(f"m.layers.0.self_attn.{x}", top, top + 2, 0, 6, 0, offset, 6))
    columns = full["o"][:, 4 * rank : 4 * rank + 4].contiguous()
    parts.append(OwnPart("o", 0, 6, 4 * rank, 4 * rank + 4, 1, 0, 4))
    parts.append(OwnPart("bias", 4 * rank, 4 * rank + 4, 0, 1, 2, 0, 1))
    parts.append(OwnPart("norm", 0, 6, 0, 1, 3, 0, 1))
    return OwnWeights(
        [qv, columns, full["bias"][4 * rank : 4 * rank + 4].clone(), full["norm"].clone()], parts
    )


class LikeNccl:
    """Stands for torch's ProcessGroupNCCL: one communicator, whose operations a rank carries out one by one.

    A message outside a group of operations fails: NCCL would make a communicator for its two ranks. A group
    ends when each of its messages has met its other end, as with NCCL, which has no room to store them.
    """

    supports_coalescing = True
    Channels = defaultdict[tuple[int, int], queue.Queue[tuple[Tensor, threading.Event]]]

    def __init__(self, rank: int, channels: Channels, all_ranks: threading.Barrier) -> None:
        self.rank, self.channels, self.all_ranks = rank, channels, all_ranks
        self.groups: list[list[tuple[int, Tensor, bool]]] = []
        self.open: list[tuple[int, Tensor, bool]] | None = None
        self.is_connected = False
        self.line = ThreadPoolExecutor(1)  # the communicator's stream

    def broadcast(self, tensors: list[Tensor], options: object) -> Done:
        self.all_ranks.wait(30)
        self.is_connected = True
        return Done(self.line.submit(lambda: None))

    def _start_coalescing(self) -> None:
        assert self.is_connected, "the first operation of a communicator needs all ranks"
        assert self.open is None
        self.open = []

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        assert self.open is not None, "an unbatched message has a communicator of its own"
        self.open.append((rank, tensors[0], True))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        assert self.open is not None, "an unbatched message has a communicator of its own"
        self.open.append((rank, tensors[0], False))

    def _end_coalescing(self) -> Done:
        group, self.open = self.open, None
        assert group, "torch has no operation for a group without messages"
        self.groups.append(group)
        return Done(self.line.submit(self._carry_out, group))

    def _carry_out(self, group: list[tuple[int, Tensor, bool]]) -> None:
        ends = []
        for other, tensor, is_sent in group:
            if is_sent:
                ends.append(threading.Event())
                self.channels[self.rank, other].put((tensor, ends[-1]))
        for other, tensor, is_sent in group:
            if not is_sent:
                came, end = self.channels[other, self.rank].get(timeout=30)
                assert came.shape == tensor.shape
                tensor.copy_(came)
                end.set()
        assert all(end.wait(30) for end in ends), "nobody receives"

    def abort(self) -> None: ...


class Done:
    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def is_completed(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result(60)


class Ranks:
    """Two trainer ranks and two servers of two ranks, each a thread; the last ones have the model."""

    def __init__(self, timeout: float = 120.0, like_nccl: bool = False) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.models = [Engine(rank % 2) for rank in range(4)]
        self.groups: list[Any] = []
        self.senders: list[Sender] = []
        self.shards: list[Shards] = []
        self.errors: dict[int, BaseException] = {}
        made: dict[int, tuple[dist.Store, Any]] = {}
        channels: LikeNccl.Channels = defaultdict(queue.Queue)
        all_ranks = threading.Barrier(6)

        def meet(rank: int) -> None:
            store = dist.TCPStore("127.0.0.1", self.store.port, is_master=False)
            if like_nccl:
                made[rank] = (store, LikeNccl(rank, channels, all_ranks))
                return
            made[rank] = (store, dist.ProcessGroupGloo(store, rank, 6, timedelta(seconds=timeout)))

        self.together({rank: lambda rank=rank: meet(rank) for rank in range(6)})
        for rank in range(6):
            store, group = made[rank]
            if like_nccl:  # another group ends for its peers when nothing refers to it
                self.groups.append(group)
            if rank < 2:
                member = Membership(store, group, rank, "nccl" if like_nccl else "gloo")
                self.senders.append(Sender(member, torch.float32, timeout, lambda: False))
            else:
                self.shards.append(Shards(group, store, rank, torch.device("cpu")))

    def together(self, work: dict[int, Callable[[], None]]) -> None:
        def one(rank: int) -> None:
            try:
                work[rank]()
            except BaseException as error:
                self.errors[rank] = error.with_traceback(None)  # its frames would keep the group
                self.close(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"

    def close(self, rank: int) -> None:
        """End the connections of a rank that has failed."""
        (self.senders[rank] if rank < 2 else self.shards[rank - 2]).close()

    def prepare(self, full: dict[str, Tensor], limit: int) -> None:
        self.plan = plan_push(*self.layouts(full), limit)
        for rank, part in self.plan.parts().items():
            self.store.set(f"plan.{rank}", part.packed())

    def layouts(self, full: dict[str, Tensor]) -> tuple[list[Table], list[Any], list[Any]]:
        """The tables, what each trainer rank holds, and what the ranks of each server need."""
        tables = [(name, "float32", list(tensor.shape)) for name, tensor in full.items()]
        self.store.set("tables", zlib.compress(json.dumps(tables).encode()))
        for shards, model in zip(self.shards, self.models, strict=True):
            shards.read_layout(model.load_weights)
            model.calls.clear()
        sized = [Table(n, s[0], torch.Size(s).numel() // s[0], 4) for n, _, s in tables]
        numbers = {name: i for i, (name, _, _) in enumerate(tables)}
        layouts: list[dict[int, list[Box]]] = [{}, {}]
        for rank in range(2):
            for part in own_parts(rank, full).parts:
                box = Box(part.top, part.bottom, part.left, part.right)
                layouts[rank].setdefault(numbers[part.name], []).append(box)
        needs = [json.loads(zlib.decompress(self.store.get(f"needs.{rank}"))) for rank in range(2, 6)]
        needed = [{i: [Box(*box) for box in boxes] for i, boxes in layout} for layout in needs]
        return sized, layouts, [needed[:2], needed[2:]]

    def push(self, full: dict[str, Tensor], servers: tuple[int, ...] = (2, 3, 4, 5)) -> None:
        work = {r: lambda r=r: self.senders[r].send(own_parts(r, full)) for r in range(2)}
        for rank in servers:
            shards, model = self.shards[rank - 2], self.models[rank - 2]
            work[rank] = lambda s=shards, m=model: s.receive(m.load_weights)
        self.together(work)


def test_a_push_gives_every_rank_its_slices_over_and_over():
    ranks = Ranks()
    ranks.prepare(FULL, limit=40)
    assert not any(model.calls or model.qv.any() for model in ranks.models), "learning changes nothing"
    for step in range(3):
        full = {name: tensor + step for name, tensor in FULL.items()}
        ranks.push(full)
        assert not ranks.errors, ranks.errors
        for model in ranks.models:
            for name, tensor in model.expected(full).items():
                assert torch.equal(getattr(model, name), tensor), name
    links: dict[tuple[int, int], int] = {}
    for rank in range(6):
        for link, size in json.loads(ranks.store.get(f"counted.{rank}")).items():
            assert links.setdefault(tuple(map(int, link.split("-"))), size) == size, (
                "both ends count the same"
            )
    assert links == dict(ranks.plan.link_bytes())
    attention = {name for name in FULL if "attn" in name}
    assert all(attention in model.calls for model in ranks.models), "loaders may fuse these"
    # Each rank of a server has half of everything but the norm, and nothing was sent of "ignored".
    half = sum(FULL[name].nbytes for name in FULL if name not in ("norm", "ignored")) // 2
    assert ranks.plan.sent_bytes()[0] + ranks.plan.sent_bytes()[1] == 2 * half + FULL["norm"].nbytes


def test_messages_of_a_round_are_one_operation_and_so_are_its_loads():
    """On a stand-in for NCCL, whose groups of messages block until both ends are there."""
    ranks = Ranks(like_nccl=True)
    ranks.prepare(FULL, limit=40)
    parts = ranks.plan.parts()
    for step in range(3):
        for group, model in zip(ranks.groups, [None, None, *ranks.models], strict=True):
            group.groups.clear()
            if model is not None:
                model.calls.clear()
        ranks.push({name: tensor + step for name, tensor in FULL.items()})
        assert not ranks.errors, ranks.errors
        for rank, group in enumerate(ranks.groups):
            rounds = zip(parts[rank].sends, parts[rank].receives, strict=True)
            busy = [len(sends) + len(receives) for sends, receives in rounds if sends or receives]
            connecting = 1 if step == 0 else 0
            assert [len(messages) for messages in group.groups[connecting:]] == busy
        for rank, model in enumerate(ranks.models, 2):
            assert len(model.calls) <= sum(bool(messages) for messages in parts[rank].receives)
            full = {name: tensor + step for name, tensor in FULL.items()}
            for name, tensor in model.expected(full).items():
                assert torch.equal(getattr(model, name), tensor), name


def test_small_tensors_of_a_round_are_loaded_in_one_call():
    """A mixture of experts has tens of thousands of them, and a loader reads all parameters' names a call."""
    ranks = Ranks()
    ranks.prepare(FULL, limit=10**6)
    ranks.push(FULL)
    assert not ranks.errors, ranks.errors
    for rank, model in enumerate(ranks.models, 2):
        assert len(model.calls) == sum(bool(messages) for messages in ranks.plan.parts()[rank].receives)
        assert len(model.calls) < 4, "five tensors"


def test_a_trainer_whose_link_never_forms_hears_that_the_push_has_failed():
    """NCCL's call never returns if a rank has died before it; the rank's own thread goes on."""

    class Hanging(LikeNccl):
        def broadcast(self, tensors: list[Tensor], options: object) -> Done:
            threading.Event().wait(600)
            raise AssertionError("it came")

    ranks = Ranks()
    ranks.prepare(FULL, limit=40)
    group = Hanging(0, defaultdict(queue.Queue), threading.Barrier(6))
    has_stopped = threading.Event()
    member = Membership(ranks.store, group, 0, "nccl")
    sender = Sender(member, torch.float32, 60.0, has_stopped.is_set)
    threading.Timer(0.3, has_stopped.set).start()
    with pytest.raises(Stopped, match="failed elsewhere"):
        sender.send(own_parts(0, FULL))
    shards = Shards(group, ranks.store, 2, torch.device("cpu"))
    threading.Timer(0.3, lambda: ranks.store.set(STOP, "1")).start()
    with pytest.raises(RuntimeError, match="failed at another rank"):
        shards.receive(lambda weights: None)


def test_a_server_holds_only_tensors_that_are_on_their_way():
    """Their parts together would be the model once more, beside the engine's memory."""
    ranks = Ranks()
    ranks.prepare(FULL, limit=40)
    most = [0] * 4

    def watched(shards: Shards, index: int) -> None:
        make, alive = shards._full, weakref.WeakSet()

        def counted(number: int) -> FullTensor:
            tensor = make(number)
            alive.add(tensor)
            most[index] = max(most[index], len(alive))
            return tensor

        shards._full = counted

    for index, shards in enumerate(ranks.shards):
        watched(shards, index)
    ranks.push(FULL)
    assert not ranks.errors and max(most) < 5, most


def test_a_rank_that_leaves_ends_the_push_of_all_others():
    """The first server's second rank never receives. When it leaves, nobody waits for the timeout."""
    ranks = Ranks(timeout=300.0)
    ranks.prepare(FULL, limit=40)
    leave = threading.Timer(1.0, ranks.shards[1].close)
    leave.start()
    ranks.push(FULL, servers=(2, 4, 5))
    assert {2, 4, 5} <= set(ranks.errors) <= {0, 1, 2, 4, 5}, "a trainer that sends nothing to it is done"


def learned(shape: tuple[int, ...], copy: Callable[[Tensor], None]) -> list[tuple[int, int, int, int]]:
    full_tensor = FullTensor("w", torch.float32, shape)
    copy(Slice.of(full_tensor))
    return full_tensor.needed()


def test_what_a_loader_copies_is_learned_whatever_views_it_takes():
    target = torch.zeros(4, 3)
    rows = learned((8, 6), lambda w: target.copy_(w[2:6].narrow(1, 3, 3)))
    assert rows == [(2, 6, 3, 6)]
    assert learned((6, 8), lambda w: target.copy_(w.t()[4:, :3])) == [(0, 3, 4, 8)]
    assert learned((2, 4, 6), lambda w: target.copy_(w[1].view(4, 6)[:, :3])) == [(1, 2, 0, 21)]
    assert learned((8, 6), lambda w: target.__setitem__(slice(0, 2), w[1:3, 3:])) == [(1, 3, 3, 6)]
    assert learned((8,), lambda w: target[0].copy_(w.split(3)[1])) == [(3, 6, 0, 1)]
    assert learned((), lambda w: target[0, 0].copy_(w)) == [(0, 1, 0, 1)]
    assert learned((8, 6), lambda w: target.copy_(torch.cat([w, w])[:4, :3])) == [(0, 8, 0, 6)]
    assert learned((8, 6), lambda w: target.copy_(w.to(torch.bfloat16)[:4, :3])) == [(0, 8, 0, 6)]
    assert learned((8, 6), lambda w: None) == []
    assert learned((8, 6), lambda w: target[:0].copy_(w.narrow(0, 8, 0)[:, :3])) == [], "only padding"
    assert not target.any()


def test_a_slice_gives_what_the_whole_tensor_would_and_nothing_else():
    full = torch.arange(48.0).view(8, 6)
    full_tensor = FullTensor("w", torch.float32, (8, 6))
    full_tensor.parts = {(2, 6, 3, 6): full[2:6, 3:6].clone()}
    target = torch.zeros(4, 3)
    target.copy_(Slice.of(full_tensor)[2:6].narrow(1, 3, 3))
    assert torch.equal(target, full[2:6, 3:])
    target[1:3, ...] = Slice.of(full_tensor)[2:4, 3:].view_as(target[1:3])
    assert torch.equal(target[1:3], full[2:4, 3:])
    target[:3, :2].copy_(Slice.of(full_tensor).t()[3:, 4:6])
    assert torch.equal(target[:3, :2], full.t()[3:, 4:6])
    with pytest.raises(RuntimeError, match=r"^w: the engine copies rows 0 to 3, columns 0 to 2, and did"):
        target.copy_(Slice.of(full_tensor)[:4, :3])
    with pytest.raises(RuntimeError, match=r"^w: the engine computes with it"):
        target.copy_(Slice.of(full_tensor)[2:6, 3:] * 2)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("Qwen2", "tp2 pp2"),
        ("Qwen3.5", "tp2"),
        pytest.param("Qwen3-MoE", "ep2 etp2 tp2", marks=pytest.mark.proof),
    ],
)
def test_the_parts_that_ranks_hold_are_those_of_the_export(
    family: str, layout: str, task: Path, tmp_path: Path
):
    """Put together, they are the exported tensors, byte for byte, and each rank reads its present weights."""
    if family == "Qwen3-MoE":
        task = moe_task.make(task, tmp_path / "task")
    elif family == "Qwen3.5":  # its conversion adds 1 to some norms
        task = family_task.make(task, tmp_path / "task", family)
    launch(
        "helpers.pushes.sharded_worker:parts", [2 if layout == "tp2" else 4], str(task), str(tmp_path), layout
    )
    exported, assembled = (torch.load(tmp_path / name) for name in ("exported", "assembled"))
    assert exported.keys() == assembled.keys()
    for name, tensor in exported.items():
        assert torch.equal(assembled[name], tensor.reshape(assembled[name].shape)), name
