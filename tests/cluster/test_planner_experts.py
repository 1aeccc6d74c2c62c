"""Bytes that experts' exchange sends, by all-to-all and DeepEP, against sets of experts drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_gvpo.planner import architecture, workload
from megatron_gvpo.planner.step_time import exchanged_copies, seconds
from megatron_gvpo.planner.workload import NODE, Layout, Lengths, Workload

DRAWS = 4000


@pytest.mark.parametrize("ep", [2, 8, 32, 64])
@pytest.mark.parametrize("exchange", ["a2a", "deepep"])
def test_copies_are_those_of_random_routes(ep: int, exchange: str) -> None:
    """A token of rank 0, whose node has the first ranks."""
    model = architecture.load("Qwen/Qwen3-235B-A22B")
    drawn, near, far = random.Random(0), 0, 0
    for _ in range(DRAWS):
        experts = drawn.sample(range(model.experts), model.experts_per_token)
        ranks = [expert * ep // model.experts for expert in experts]
        if exchange == "a2a":
            near += sum(0 < rank < NODE for rank in ranks)
            far += sum(rank >= NODE for rank in ranks)
        else:  # the rank with this rank's number on each node receives, and hands on to the others there
            far += len({rank // NODE for rank in ranks} - {0})
            near += len({rank for rank in ranks if rank % NODE})
    expected = exchanged_copies(model, ep, exchange)
    assert expected == pytest.approx((near / DRAWS, far / DRAWS), rel=0.05, abs=0.01)


def test_deepep_is_predicted_faster_where_experts_are_on_many_nodes() -> None:
    model, gpu = architecture.load("Qwen/Qwen3-235B-A22B"), workload.gpu("h800")
    work = Workload(256, 8, 500, Lengths(2000, 5000, 8192))
    layout = Layout(256, tp=4, ep=64, recompute=True, rollout_tp=8)
    times = [
        seconds(model, gpu, layout, replace(work, ep_exchange=exchange), 8192).step
        for exchange in ("a2a", "deepep")
    ]
    assert times[1] < times[0]
