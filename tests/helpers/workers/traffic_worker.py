"""Rank function of test_traffic.py: the bytes that real megatron-core models send in one update."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from helpers.distributed import run_number
from helpers.paths import ROOT
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.microbatch import my_share
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.settings.config import build_config
from megatron_gvpo.types import TrainBatch

sys.path.append(str(ROOT / "benchmarks"))

from lib.scaling.traffic_counter import TrafficCounter, group_names


def rows_of(lengths: list[tuple[int, int]]) -> TrainBatch:
    """Groups of two rows with given numbers of prompt and response tokens."""
    n = len(lengths)
    return TrainBatch(
        prompt_ids=[(3,) * prompt for prompt, _ in lengths],
        response_ids=[(4,) * response for _, response in lengths],
        group_n=torch.arange(n) // 2,
        reward_n=torch.arange(n) % 2 * 1.0,
        truncated_n=torch.zeros(n, dtype=torch.bool),
    )


def operations() -> dict[str, int]:
    """Bytes of each operation on two ranks, called in all the ways in which Megatron calls it."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    one, two = torch.ones(6), torch.ones(12)
    gather: Any = dist.all_gather_into_tensor  # kept under another name, as Megatron does
    with TrafficCounter({dist.group.WORLD.group_name: "all"}) as traffic:
        dist.all_reduce(one)
        dist.all_reduce(one[1:3], async_op=True).wait()  # a view
        gather(two, one)
        dist.all_gather([torch.empty(6), torch.empty(6)], one)
        dist.reduce_scatter_tensor(one, two)
        dist.all_to_all_single(one, torch.ones(6))
        dist.broadcast(one, 0)
        sends = [dist.P2POp(dist.isend, two, other), dist.P2POp(dist.irecv, torch.empty(12), other)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        x = torch.ones(2, requires_grad=True)
        _Reduced.apply(x).sum().backward()  # in a backward pass
        dist.barrier()
    assert rank in (0, 1)
    return {operation: volume.bytes for (operation, _), volume in traffic.volumes.items()}


OPERATIONS = {
    "all_reduce": 4 * (6 + 2 + 2),
    "all_gather": 4 * (12 + 12),
    "reduce_scatter": 4 * 12,
    "all_to_all": 4 * 6,
    "broadcast": 4 * 6,
    "send": 4 * 12,
    "receive": 4 * 12,
    "barrier": 0,
}


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def run(directory: str) -> None:
    folder = Path(directory)
    cases: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text())
    case = cases[run_number()]
    if run_number() == 1:  # the first run on two ranks
        assert (operators := operations()) == OPERATIONS, operators
    config = build_config(
        {
            "output_dir": "unused",
            "model": {"path": case["model"], "dtype": "float32"},
            "data": {"train": {"path": "unused"}},
            "algorithm": {"recipe": "gvpo"},
            "rewards": {"components": [{"name": "math"}]},
            "train": {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": case["budget"]},
            "optimizer": {"lr": 1e-3},
            "parallel": case["parallel"],
        }
    )
    policy = Policy.of(config)
    rows = rows_of(case["lengths"])
    share = my_share(policy.model, rows, case["budget"], keep_groups=True)
    shares_prompts = policy.model.shares_prompts_of(rows)
    packs = [PackedBatch.pack(pack, policy.model.padding, shares_prompts) for pack in share.packs(rows)]
    with TrafficCounter(group_names()) as traffic:
        policy.update(rows, at_step_start=case["at_step_start"])
    result = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "packs": [(len(pack.token_t), len(pack.label_r)) for pack in packs],
        "sent": {" ".join(key): volume.bytes for key, volume in traffic.volumes.items()},
        "calls": {" ".join(key): volume.calls for key, volume in traffic.volumes.items()},
    }
    (folder / f"{run_number()}_{dist.get_rank()}.json").write_text(json.dumps(result))
