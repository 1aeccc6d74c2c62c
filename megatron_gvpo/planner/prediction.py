"""The planner's prediction for a configuration: what a start warns by, and a rehearsal is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.memory_model import memory
from megatron_gvpo.planner.packs import size_of
from megatron_gvpo.planner.workload import Layout
from megatron_gvpo.settings.config import Config

# The planner's parts under the names of a rehearsal's.
_PARTS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
}
_PARTS |= {name: name for name in ("critic", "head", "workspaces", "teacher", "runtime", "total")}


def predict(
    config: Config, world: int, micro_batches: int | None = None, stage: int | None = None
) -> dict[str, float] | None:
    """GiB by part as `plan` would have them; None for a model that the planner lacks.

    `stage`: a pipeline stage; default: the fullest. With options that it does not count it gives neither
    activations nor the total.
    """
    predicted = _parts(config, layout_of(config, world), micro_batches, stage)
    if predicted is None or _knows_activations(config):
        return predicted
    return {name: size for name, size in predicted.items() if name not in ("activations", "head", "total")}


def least(config: Config, world: int) -> float | None:
    """The total in GiB, or a lower bound if `predict` cannot tell; None for other models.

    No option keeps less on the GPU than computing all activations again.
    """
    layout = layout_of(config, world)
    if not _knows_activations(config):
        layout = replace(layout, recompute=True)
    predicted = _parts(config, layout, None, None)
    return None if predicted is None else predicted["total"]


def layout_of(config: Config, world: int) -> Layout:
    """The configuration's layout, as the planner has it."""
    parallel = config.parallel
    return Layout(
        gpus=world,
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        sequence_parallel=parallel.sequence_parallel,
        recompute=parallel.recompute == "full" and parallel.recompute_layers is None,
        recompute_modules=parallel.recompute_modules if parallel.recompute == "selective" else (),
        stages=parallel.stage_layers,
        fp8=config.model.fp8 is not None,
        offload=config.optimizer.offload_fraction,
    )


def _parts(
    config: Config, layout: Layout, micro_batches: int | None, stage: int | None
) -> dict[str, float] | None:
    try:
        model = architecture.load(str(Path(config.model.path) / "config.json"))
    except ConfigError:
        return None
    if config.model.adapter is not None:
        model = replace(model, adapter_rank=config.model.adapter.rank)
    size = size_of(config, layout.dp, micro_batches)
    work = size.tokens_of_a_pack, size.micro_batches, config.algorithm.critic is not None
    responses = size.rows_of_a_pack * size.response
    predicted = memory(model, layout, *work, responses=responses, stage=stage)
    return {_PARTS[name]: gib for name, gib in predicted.in_gib().items() if gib}


def _knows_activations(config: Config) -> bool:
    parallel = config.parallel
    return not (parallel.recompute_layers or parallel.offload_layers or parallel.offload_modules)
