"""How tokens reach the experts of other ranks: by all-to-all, or by DeepEP's kernels (parallel.ep_exchange).

All-to-all sends a token once for each of its experts. DeepEP sends it once for each rank that has some of
them, and adds up there what that rank's experts return.
"""

from __future__ import annotations

from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig


def exchange_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the TransformerConfig's fields that choose megatron-core's dispatcher."""
    if parallel.ep_exchange == "a2a":
        return {"moe_token_dispatcher_type": "alltoall"}  # also of dense models, which have none
    return {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "deepep",
        "moe_router_dtype": "fp32",  # the only weights that DeepEP sends
        "moe_shared_expert_overlap": False,  # as Megatron-Bridge sets it beside this dispatcher
    }


def check_exchange(model: ModelConfig, parallel: ParallelConfig, on_cpu: bool) -> None:
    """Raise ConfigError if DeepEP is chosen and this machine, or the dtype, cannot have it."""
    if parallel.ep_exchange == "a2a":
        return
    here = "parallel.ep_exchange=deepep"
    if on_cpu:
        raise ConfigError(f"{here}: DeepEP's kernels need GPUs, and there is none here; leave it out")
    if model.dtype != "bfloat16":
        raise ConfigError(
            f"{here}: DeepEP adds up experts' outputs in bfloat16 only, not model.dtype={model.dtype}"
        )
    from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP

    if not HAVE_DEEP_EP:
        raise ConfigError(
            f"{here}: megatron-core cannot import DeepEP 1.2 here (DeepEP 2 lacks utils.EventOverlap): "
            "install it as docker/trainer.Dockerfile does, or leave the key out"
        )
