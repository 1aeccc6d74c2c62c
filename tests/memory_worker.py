"""What the ranks of real megatron-core models hold: for test_planner."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_gvpo.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gvpo.megatron import model, parallel
from megatron_gvpo.megatron.critic import without_output_layer
from megatron_gvpo.megatron.optimizer import Optimizer

LAYOUTS = {1: [(1, 1)], 2: [(1, 1), (2, 1), (1, 2)], 4: [(1, 1), (2, 1), (2, 2)]}  # (tp, pp)


def run(task: str, out: str) -> None:
    world = dist.get_world_size()
    for tp, pp in LAYOUTS[world]:
        layout = ParallelConfig(tp=tp, pp=pp)
        parallel.initialize(layout, seed=0)
        precision = ModelConfig(path=f"{task}/model", dtype="float32")
        for critic in (False, True):
            built = model.build(precision, layout, before_wrapping=without_output_layer if critic else None)
            optimizer = Optimizer(built, OptimizerConfig(lr=1e-3), precision, updates=1)
            states = [state for adam in optimizer._adams() for state in adam.state.values()]
            held = {
                "world": world,
                "tp": tp,
                "pp": pp,
                "critic": critic,
                "stage": parallel_state.get_pipeline_model_parallel_rank(),
                "parameters": sum(p.nbytes for chunk in built.chunks for p in chunk.parameters()),
                "gradients": sum(b.grad_data.nbytes for chunk in built.chunks for b in chunk.buffers),
                "optimizer": sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in states),
            }
            name = f"{world}_{tp}_{pp}_{critic}_{dist.get_rank()}.json"
            (Path(out) / name).write_text(json.dumps(held))
        parallel_state.destroy_model_parallel()
