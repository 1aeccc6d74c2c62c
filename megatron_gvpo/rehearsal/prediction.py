"""The planner's prediction for a configuration: what a rehearsal is compared with."""

from __future__ import annotations

from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.memory_model import memory
from megatron_gvpo.planner.workload import Layout
from megatron_gvpo.rehearsal.rows import size_of
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
    parallel = config.parallel
    layout = Layout(
        gpus=world,
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        ep=parallel.ep,
        recompute=parallel.recompute == "full" and parallel.recompute_layers is None,
        fp8=config.model.fp8 is not None,
        offload=config.optimizer.offload_fraction,
    )
    size = size_of(config, layout.dp, micro_batches)
    try:
        model = architecture.load(str(Path(config.model.path) / "config.json"))
    except ConfigError:
        return None
    critic = config.algorithm.critic is not None
    predicted = memory(model, layout, size.tokens_of_a_pack, size.micro_batches, critic).in_gib()
    known = predicted if _knows_activations(parallel) else predicted.keys() - {"activations", "total"}
    return {_PARTS[name]: predicted[name] for name in predicted if name in known and predicted[name]}


def _knows_activations(parallel: ParallelConfig) -> bool:
    recomputes = parallel.recompute == "full" and parallel.recompute_layers is None
    keeps = parallel.recompute == "none" or parallel.recompute_modules == ("core_attn",)
    offloads = bool(parallel.offload_layers or parallel.offload_modules)
    return (recomputes or keeps) and not offloads
