"""The planner's prediction for a configuration: what a rehearsal is compared with."""

from __future__ import annotations

from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.memory_model import memory
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
_PARTS |= {"critic": "critic", "head": "head", "teacher": "teacher", "runtime": "runtime", "total": "total"}


def predict(config: Config, world: int, micro_batches: int | None = None) -> dict[str, float] | None:
    """GiB by part on the fullest stage, as `plan` would have them; None for a model that the planner lacks.

    It knows `recompute=full` of the options that save activations, and no others.
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
    found = memory(model, layout, size.tokens_of_a_pack, size.micro_batches, critic).in_gib()
    return {_PARTS[name]: value for name, value in found.items() if value}
