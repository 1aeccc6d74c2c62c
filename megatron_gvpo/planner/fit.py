"""Says whether a configuration fits into a GPU's memory, by the planner's prediction, before a run starts."""

from __future__ import annotations

from megatron_gvpo.planner.prediction import least
from megatron_gvpo.settings.config import Config

USABLE = 0.94  # fraction of a GPU's memory that a layout may fill
SERVER_GIB = 4.0  # a colocated server that sleeps: its context and its CUDA graphs
_ALONE = 0.98  # usable share of a GPU beside a sleeping server; the driver takes the rest
COMMON_GIB = 79.6  # memory of an "80 GB" H100 or H800, assumed for the GPUs of a Slurm job


def usable_gib(gpu_gib: float, colocated: bool) -> float:
    """GiB of a GPU with `gpu_gib` that the trainer may fill: 74.0 of 79.6 where servers sleep beside it."""
    usable = USABLE * gpu_gib
    return min(usable, _ALONE * gpu_gib - SERVER_GIB) if colocated else usable


def excess(config: Config, world: int, gpu_gib: float) -> str | None:
    """One line for a configuration that needs more than a GPU of `gpu_gib` GiB has; None if it fits.

    `world`: the trainer's ranks. It is a prediction: callers warn, and do not refuse. None as well for models
    that the planner does not know, and for layouts that other checks refuse.
    """
    parallel = config.parallel
    if world % (parallel.tp * parallel.pp * parallel.cp) or world % (parallel.pp * parallel.ep):
        return None
    needed = least(config, world)
    colocated = config.rollout.uses_servers and config.rollout.servers.colocated
    limit = usable_gib(gpu_gib, colocated)
    if needed is None or needed <= limit:
        return None
    beside = " beside a sleeping server" if colocated else ""
    return (
        f"the update needs about {needed:.0f} GiB on the fullest of {world} GPUs (predicted), and "
        f"{limit:.0f} of {gpu_gib:.0f} GiB are usable{beside}: lower train.max_tokens_per_micro_batch="
        f"{config.train.max_tokens_per_micro_batch}, set parallel.recompute, or divide the model among more "
        f"GPUs; `megatron-gvpo rehearse CONFIG.yaml --world {world}` shows the memory by part"
    )
