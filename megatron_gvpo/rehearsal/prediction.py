"""The planner's prediction for a configuration: what a rehearsal is compared with."""

from __future__ import annotations

from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.memory_model import stage_memory
from megatron_gvpo.planner.workload import Layout
from megatron_gvpo.rehearsal.rows import size_of
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
    config: Config, world: int, stage: int, micro_batches: int | None = None
) -> dict[str, float] | None:
    """GiB by part on a pipeline stage, as `plan` would have them; None for a model that the planner lacks.

    With options that it does not count it gives neither activations nor the total.
    """
    try:
        model = architecture.load(str(Path(config.model.path) / "config.json"))
    except ConfigError:
        return None
    layout = layout_of(config, world)
    size = size_of(config, layout.dp, micro_batches)
    responses = size.rows_of_a_pack * size.response
    predicted = stage_memory(
        model,
        layout,
        stage,
        size.tokens_of_a_pack,
        size.micro_batches,
        config.algorithm.critic is not None,
        responses=responses,
    ).in_gib()
    is_known = knows_activations(config) and model.delta_net is None
    known = predicted if is_known else predicted.keys() - {"activations", "head", "total"}
    return {_PARTS[name]: predicted[name] for name in predicted if name in known and predicted[name]}


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
        recompute=parallel.recompute == "full",
        recompute_modules=parallel.recompute_modules if parallel.recompute == "selective" else (),
        stages=parallel.stage_layers,
        fp8=config.model.fp8 is not None,
        offload=config.optimizer.offload_fraction,
    )


def knows_activations(config: Config) -> bool:
    """True if the planner counts the activations of this configuration's options."""
    parallel = config.parallel
    others = (
        *(parallel.offload_layers, parallel.offload_modules, parallel.recompute_layers),
        *(config.model.fp8, config.model.adapter, config.train.share_prompts, config.teacher),
    )
    return not any(others)
