"""The planner's prediction of memory for a configuration, which a start and a rehearsal compare with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.memory_model import memory
from megatron_gvpo.planner.packs import size_of
from megatron_gvpo.planner.workload import Layout
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.parallel import ParallelConfig

# The planner's parts under the names of a rehearsal's.
_PARTS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
}
_PARTS |= {"critic": "critic", "head": "head", "teacher": "teacher", "runtime": "runtime", "total": "total"}


def predict(config: Config, world: int, micro_batches: int | None = None) -> dict[str, float] | None:
    """GiB by part on the fullest stage, as `plan` would have them; None for a model that the planner lacks.

    It knows `recompute=full` of the options that save activations: with others it gives neither activations
    nor the total.
    """
    predicted = _parts(config, world, micro_batches, _recomputes_all(config.parallel))
    if predicted is None or _knows_activations(config.parallel):
        return predicted
    return {name: size for name, size in predicted.items() if name not in ("activations", "total")}


def least(config: Config, world: int) -> float | None:
    """The total in GiB, or a lower bound if `predict` cannot tell; None for other models.

    No option keeps less on the GPU than computing all activations again.
    """
    recompute = _recomputes_all(config.parallel) or not _knows_activations(config.parallel)
    predicted = _parts(config, world, None, recompute)
    return None if predicted is None else predicted["total"]


def _parts(config: Config, world: int, micro_batches: int | None, recompute: bool) -> dict[str, float] | None:
    parallel = config.parallel
    layout = Layout(
        gpus=world,
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        ep=parallel.ep,
        recompute=recompute,
        fp8=config.model.fp8 is not None,
        offload=config.optimizer.offload_fraction,
    )
    size = size_of(config, layout.dp, micro_batches)
    try:
        model = architecture.load(str(Path(config.model.path) / "config.json"))
    except ConfigError:
        return None
    if config.model.adapter is not None:
        model = replace(model, adapter_rank=config.model.adapter.rank)
    critic = config.algorithm.critic is not None
    predicted = memory(model, layout, size.tokens_of_a_pack, size.micro_batches, critic).in_gib()
    return {_PARTS[name]: gib for name, gib in predicted.items() if gib}


def _recomputes_all(parallel: ParallelConfig) -> bool:
    return parallel.recompute == "full" and parallel.recompute_layers is None


def _knows_activations(parallel: ParallelConfig) -> bool:
    keeps = parallel.recompute == "none" or parallel.recompute_modules == ("core_attn",)
    offloads = bool(parallel.offload_layers or parallel.offload_modules)
    return (_recomputes_all(parallel) or keeps) and not offloads
