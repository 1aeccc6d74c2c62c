"""The predicted steps and weight pushes on 8 to 1,024 GPUs: the table in the docs, and what it must obey."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from helpers.suite.doc_tables import Hold

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture, push_time, workload
from megatron_gvpo.planner.memory_model import shard
from megatron_gvpo.planner.search import search
from megatron_gvpo.planner.workload import Layout, method
from megatron_gvpo.weights.shard_plan import Box, Table, plan_push

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "planner.md"
MODELS = ("Qwen/Qwen2.5-7B", "Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3")
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
QUICK = [(MODELS[0], 8), (MODELS[0], 64), (MODELS[1], 32), (MODELS[1], 64), (MODELS[2], 16), (MODELS[2], 256)]


def row(name: str, gpus: int) -> str:
    """The fastest layout that `megatron-gvpo plan` finds, with its step and push; or why there is none."""
    model, gpu = architecture.load(name), workload.gpu("h800")
    lengths, scoring = workload.parse_lengths("850,p95=3000"), method("gvpo", 1).scoring
    work = workload.Workload(1024, 5, 256, lengths, scoring=scoring)
    begin = f"| {name.split('/')[1]} | {gpus} |"
    try:
        best = search(model, gpu, gpus, work).best[0]
    except ConfigError as error:
        reasons = str(error).removeprefix("no layout can run: ").split("; ")
        other_reasons = [reason for reason in reasons if "layouts: " not in reason]
        return f"{begin} none: {'; '.join(other_reasons)} | | | | | |"
    layout = best.layout
    parts = push_time.predicted(model, gpu, layout)
    shards = f"{parts.seconds:.2f} | {parts.busiest_trainer / 1e9:.2f} | {parts.server / 1e9:.1f}"
    broadcast_seconds = push_time.broadcast(model, gpu, layout).seconds
    return f"{begin} {layout.name} | {best.seconds.step:.0f} | {broadcast_seconds:.1f} | {shards} |"


def table() -> str:
    head = ["model", "GPUs", "fastest layout", "step s", "whole s", "by shards s"]
    head += ["trainer rank sends GB", "server rank gets GB"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(row(name, gpus) for name in MODELS for gpus in COUNTS)])


@pytest.mark.proof  # in `make test`, some of its rows
def test_the_page_has_what_is_predicted(hold_current: Hold):
    hold_current(PAGE, {"predictions": table})


@pytest.mark.parametrize(("name", "gpus"), QUICK)
def test_the_page_has_rows_that_are_predicted(name: str, gpus: int):
    assert row(name, gpus) in PAGE.read_text(), row(name, gpus)


def test_the_predicted_bytes_are_those_of_a_plan():
    """A model's layers as one tensor per rank: shares and parts are what the planner of pushes counts."""
    model, layout = architecture.load("Qwen/Qwen2.5-7B"), Layout(4, tp=2, rollout_gpus=4, rollout_tp=2)
    half = model.layers * (model.attention + model.mlp) // 2 + model.embedding
    tables = [Table("split", 2, half, 2), Table("all", model.layers * model.replicated + model.hidden, 1, 2)]
    everything = [Box(0, tables[1].rows, 0, 1)]
    shards = [{0: [Box(rank % 2, rank % 2 + 1, 0, half)], 1: everything} for rank in range(4)]
    plan = plan_push(tables, shards, [shards[:2], shards[2:]], 2**28)
    predicted = push_time.sharded(model, workload.gpu("h800"), layout)
    sent, links = plan.sent_bytes(), plan.link_bytes()
    got = sum(size for (_, target), size in links.items() if target == 4)
    assert got == pytest.approx(predicted.server, rel=1e-3)
    # Each of the two that hold a half sends half of it; the plan cuts cells of whole rows, which halves are.
    assert sum(sent[rank] for rank in range(4)) == pytest.approx(4 * predicted.busiest_trainer, rel=1e-3)


def test_the_predicted_bytes_of_a_colocated_push_are_those_of_a_plan():
    """Two machines have a pipeline stage each, and a server of eight ranks. Each lacks one stage."""
    model = architecture.load("Qwen/Qwen2.5-7B")
    layout = Layout(16, tp=2, pp=2, rollout_tp=8)
    stages = [shard(model, layout, stage).dense * layout.tp for stage in range(2)]
    tables = [Table(f"stage {stage}", 8, round(size / 8), 2) for stage, size in enumerate(stages)]
    halves = [[Box(4 * half, 4 * half + 4, 0, table.columns) for half in range(2)] for table in tables]
    shards = [{rank // 8: [halves[rank // 8][rank % 2]]} for rank in range(16)]
    server = [
        {n: [Box(row, row + 1, 0, table.columns)] for n, table in enumerate(tables)} for row in range(8)
    ]
    seats = [(rank, rank // 8) for rank in range(16)]
    plan = plan_push(tables, shards, [server, server], 2**28, seats * 2)
    far = [p for p in plan.parcels if seats[p.owner][1] != seats[p.first - 16][1]]
    gets, sends = Counter[int](), Counter[int]()
    for parcel in far:
        gets[parcel.first] += parcel.nbytes
        sends[parcel.owner // 8] += parcel.nbytes
    predicted = push_time.colocated(model, workload.gpu("h800"), layout)
    assert max(sends.values()) / 8 == pytest.approx(predicted.busiest_trainer, rel=1e-3)
    # The prediction sends unsplit tensors, 0.1 %, to every tensor-parallel rank.
    assert max(gets.values()) == pytest.approx(predicted.busiest_trainer, rel=0.01)
    total = sum(parcel.nbytes for parcel in plan.parcels if parcel.first == 16)
    assert total == pytest.approx(predicted.server, rel=0.01)


def test_a_colocated_push_of_235b_on_64_gpus_takes_under_8_s():
    """Gathering it takes 47 s. Nothing of this was measured, and the loaders' own time is not counted."""
    model, gpu = architecture.load("Qwen/Qwen3-235B-A22B"), workload.gpu("h800")
    for layout in (Layout(64, tp=4, pp=4, ep=8, rollout_tp=8), Layout(64, pp=32, cp=2, ep=2, rollout_tp=8)):
        assert push_time.fastest(model, gpu, layout) == "colocated"
        assert (
            push_time.colocated(model, gpu, layout).seconds
            < 8
            < push_time.broadcast(model, gpu, layout).seconds
        )


def test_a_sharded_push_needs_no_longer_for_more_servers():
    model, gpu = architecture.load("deepseek-ai/DeepSeek-V3"), workload.gpu("h800")
    times = {
        servers: push_time.sharded(
            model, gpu, Layout(256, pp=16, ep=16, rollout_gpus=32 * servers, rollout_tp=32)
        ).seconds
        for servers in (2, 8, 24)
    }
    assert len(set(times.values())) == 1
    assert 2.0 < times[8] < 3.0, "NeMo-RL's resharding of this model took 2.4 to 2.8 s on H100s"
