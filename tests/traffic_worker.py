"""What the ranks of real megatron-core models send in one update: for test_traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import run_number
from megatron.core import parallel_state

from megatron_gvpo.config import build_config
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.batch import TokenBatch
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.observe.traffic import Traffic
from megatron_gvpo.types import Rows


def rows_of(lengths: list[tuple[int, int]]) -> Rows:
    """Groups of two rows with so many prompt and response tokens."""
    n = len(lengths)
    return Rows(
        prompt_ids=[(3,) * prompt for prompt, _ in lengths],
        response_ids=[(4,) * response for _, response in lengths],
        group_n=torch.arange(n) // 2,
        reward_n=torch.arange(n) % 2 * 1.0,
        truncated_n=torch.zeros(n, dtype=torch.bool),
    )


def run(directory: str) -> None:
    place = Path(directory)
    cases: list[dict[str, Any]] = json.loads((place / "cases.json").read_text())
    case = cases[run_number()]
    config = build_config(
        {
            "output_dir": "unused",
            "model": {"path": case["model"], "dtype": "float32"},
            "data": {"train": {"path": "unused"}},
            "algorithm": {"recipe": "gvpo"},
            "train": {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": case["budget"]},
            "optimizer": {"lr": 1e-3},
            "parallel": case["parallel"],
        }
    )
    policy = Policy(config)
    rows = rows_of(case["lengths"])
    mine, _ = policy._plan(rows, keep_groups=True)
    packs = [TokenBatch.pack(rows.select(index), policy.model.padding) for index in mine]
    with Traffic(parallel.group_names()) as traffic:
        policy.update(rows, at_step_start=case["at_step_start"])
    result = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "packs": [(len(pack.token_t), len(pack.label_r)) for pack in packs],
        "sent": {" ".join(key): volume.bytes for key, volume in traffic.volumes.items()},
        "calls": {" ".join(key): volume.calls for key, volume in traffic.volumes.items()},
    }
    (place / f"{run_number()}_{dist.get_rank()}.json").write_text(json.dumps(result))
