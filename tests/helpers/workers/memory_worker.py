"""Rank function of test_planner.py: the bytes of memory that real megatron-core models use."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.critic import without_output_layer
from megatron_gvpo.megatron.model import build as model
from megatron_gvpo.megatron.optimizer import Optimizer
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig, OptimizerConfig

# (tp, pp, share of the optimizer's states in host memory)
LAYOUTS: dict[int, list[tuple[int, int, float]]] = {
    1: [(1, 1, 0.0)],
    2: [(1, 1, 0.0), (2, 1, 0.0), (1, 2, 0.0), (1, 1, 1.0)],
    4: [(1, 1, 0.0), (2, 1, 0.0), (2, 2, 0.0)],
}


def run(task: str, out: str) -> None:
    world = dist.get_world_size()
    for tp, pp, offload in LAYOUTS[world]:
        layout = ParallelConfig(tp=tp, pp=pp)
        parallel.initialize(layout, seed=0)
        precision = ModelConfig(path=f"{task}/model", dtype="float32")
        for critic in (False, True):
            built = model.build(precision, layout, before_wrapping=without_output_layer if critic else None)
            options = OptimizerConfig(lr=1e-3, offload_fraction=offload)
            optimizer = Optimizer(built, options, precision, updates=1)
            states = [s for inner, host in optimizer._inner() if not host for s in inner.state.values()]
            memory = {
                "world": world,
                "tp": tp,
                "pp": pp,
                "offload": offload,
                "critic": critic,
                "stage": parallel_state.get_pipeline_model_parallel_rank(),
                "parameters": sum(p.nbytes for chunk in built.chunks for p in chunk.parameters()),
                "gradients": sum(b.grad_data.nbytes for chunk in built.chunks for b in chunk.buffers),
                "optimizer": sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in states),
                "host": optimizer.host_bytes,
            }
            name = f"{world}_{tp}_{pp}_{offload:g}_{critic}_{dist.get_rank()}.json"
            (Path(out) / name).write_text(json.dumps(memory))
        parallel_state.destroy_model_parallel()
