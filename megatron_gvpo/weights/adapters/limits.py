"""Adapters that a rollout engine would not serve as they are; refused before a server starts."""

from __future__ import annotations

from megatron_gvpo.config.schema import Config, ConfigError
from megatron_gvpo.weights.adapters.layers import adapted_layers, served_rank

# SGLang (0.5.23) makes one layer of each of these. It wants an adapter for the first layers wherever it has
# one for any of the others, and otherwise leaves those out.
_TOGETHER = ((("q_proj", "v_proj"), ("k_proj",)), (("gate_proj",), ("up_proj",)))


def check_limits(config: Config) -> None:
    """Raise ConfigError for adapters that servers of `rollout.engine` cannot serve."""
    layers, engine = adapted_layers(config), config.rollout.engine
    servers = config.rollout.servers
    if servers.model_path and servers.model_path != config.model.path:
        raise ConfigError(
            f"rollout.servers.model_path={servers.model_path}: with rollout.weights.transport=adapter "
            f"servers keep the weights that they start with, and an adapter fits those of "
            f"model.path={config.model.path}: leave it out, or use broadcast, which sends merged weights"
        )
    if engine == "vllm":
        served_rank(config)
        if "kv_b_proj" in layers:  # vLLM (0.32.0) decodes with products of the base's, made at its start
            raise ConfigError(
                "model.adapter.targets: vLLM applies an adapter of kv_b_proj to prompts, and not when it "
                "decodes: leave it out, or use rollout.engine=sglang, or "
                "rollout.weights.transport=broadcast, which sends merged weights"
            )
    for needed, others in _TOGETHER if engine == "sglang" else ():
        present = sorted({*needed, *others} & set(layers))
        absent = [name for name in needed if name not in layers]
        if present and absent:
            raise ConfigError(
                f"model.adapter.targets: SGLang serves no adapter of {present[0]} without one of "
                f"{absent[0]}: add it, or use rollout.weights.transport=broadcast, which sends merged weights"
            )
