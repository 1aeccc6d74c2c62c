"""Rank function of test_activation_offload.py: updates with and without moved activations."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from helpers.distributed import forget_layout, run_number
from helpers.workers.gradient_worker import Case, config_of

MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")


def run(directory: str) -> None:
    """Run one layout; rank 0 writes {layout}-kept.pt and {layout}-moved.pt."""
    folder = Path(directory)
    layout, case = torch.load(folder / "work.pt", weights_only=False)[run_number()]
    for name, modules in (("kept", ()), ("moved", MODULES)):
        config = config_of(case, layout, folder)
        parallel = config.parallel.model_copy(update={"offload_modules": modules})
        results = _updates(config.model_copy(update={"parallel": parallel}), cases(case))
        if dist.get_rank() == 0:
            torch.save(results, folder / f"{layout}-{name}.pt")
        forget_layout()


def cases(case: Case) -> list[Case]:
    """Updates whose micro-batches differ in number and shape."""
    fewer = case.rows.select(list(range(len(case.rows) // 2)))
    return [replace(case, budget=40), case, replace(case, rows=fewer), replace(case, budget=10_000)]


def _updates(config: Any, updates: list[Any]) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    from megatron_gvpo.megatron.model import build as model
    from megatron_gvpo.megatron.policy import Policy

    engine = import_module("megatron.core.extensions.transformer_engine")
    moved: list[int] = []
    move = offload.ChunkOffloadHandler.offload

    def counted(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        moved[-1] += tensor.nbytes
        return move(self, tensor, *args, **kwargs)

    handler = offload.ChunkOffloadHandler
    with (
        mock.patch.object(model, "_refuse_on_cpu"),
        mock.patch.object(engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False)),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
        mock.patch.object(handler, "offload", counted),
        mock.patch.object(
            handler,
            "_can_manage_tensor_for_offload",
            staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter)),
        ),
    ):
        policy = Policy.of(config)
        for chunk in policy.model.chunks:
            chunk.config.min_offloaded_tensor_size = 0
        scores, results, by_update = [], [], []
        for case in updates:
            policy._budget = case.budget
            scores.append(policy.score(case.rows))
            moved.append(0)
            results.append(policy.update(case.rows, at_step_start=False))
            by_update.append(moved[-1])
        pools = offload.PipelineOffloadManager.get_instance().cpu_tensor_pool._pools.values()
        leftover = sum(tensor.nbytes for pool in pools for tensor in pool["all"])
    return {
        "scores": scores,
        "losses": [result.metrics["loss"] for result in results],
        "grad_norms": [result.update.grad_norm for result in results],
        "weights": {name: tensor.clone() for name, tensor in policy.weights()},
        "moved_bytes": [] if not config.parallel.offload_modules else by_update,
        "left_bytes": leftover,
    }
