"""Decides from the configuration and config.json alone if adapters can be trained on a model in a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.settings.adapter import _ATTENTION, OF_MLPS, TARGETS, possible_targets

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config
    from megatron_gvpo.settings.parallel import ParallelConfig
    from megatron_gvpo.settings.sections import ModelConfig


# The reasons why other layers have no adapters.
_DROPPED = "Hugging Face PEFT (0.21.2) drops the adapters of its dense layers and shared experts"
_BEHIND_A_NORM = "a norm follows the layer, and Megatron-Bridge (0.6.2) adds an adapter's product behind it"
_UNPROVEN = "its adapters have not been compared with transformers"
_REASONS: dict[str, dict[str, str]] = {
    "DeepseekV2ForCausalLM": dict.fromkeys(OF_MLPS, _DROPPED),
    "DeepseekV3ForCausalLM": dict.fromkeys(OF_MLPS, _DROPPED),
    "Gemma3ForCausalLM": {"o_proj": _BEHIND_A_NORM, "down_proj": _BEHIND_A_NORM},
    "Glm4MoeForCausalLM": dict.fromkeys(OF_MLPS, _UNPROVEN),
    "GptOssForCausalLM": dict.fromkeys(OF_MLPS, _UNPROVEN),
    "MiniMaxM2ForCausalLM": dict.fromkeys(OF_MLPS, _UNPROVEN),
}


def check_adapter(config: Config, card: ModelCard, architecture: str) -> None:
    """Raise ConfigError if the adapters of `model.adapter` cannot be trained, or not be sent to servers."""
    if config.model.adapter is None:
        return
    check_adapter_layers(config.model, config.parallel, card, architecture)
    if config.rollout.uses_servers and config.rollout.weights.traits.sends_own:
        raise ConfigError(
            f"rollout.weights.transport={config.rollout.weights.transport} with model.adapter: it sends what "
            "each rank holds, and a rank holds base and adapters apart; use adapter, or one that sends them "
            f"merged: {'shared' if config.rollout.servers.colocated else 'broadcast'}"
        )


def check_adapter_layers(
    model: ModelConfig, parallel: ParallelConfig, card: ModelCard, architecture: str
) -> None:
    """Raise ConfigError if the adapters of `model.adapter` cannot be trained in this layout."""
    if (adapter := model.adapter) is None:
        return
    possible = possible_targets(architecture)
    if not possible:
        raise ConfigError(
            f"model.adapter: adapters on {architecture} (model.path={model.path}) have not been "
            f"compared with transformers; supported: {', '.join(TARGETS)}. Leave model.adapter out to train "
            "the weights"
        )
    if wrong := [name for name in adapter.selected(possible) if name not in possible]:
        reason = _REASONS.get(architecture, {}).get(wrong[0], "the model has no such layer")
        raise ConfigError(
            f"model.adapter.targets: {wrong[0]} on {architecture}: {reason}; possible: {', '.join(possible)}"
        )
    if adapter.rank % parallel.tp:
        raise ConfigError(
            f"parallel.tp={parallel.tp} does not divide model.adapter.rank={adapter.rank}, whose rows are "
            f"divided among the ranks: use a multiple of {parallel.tp}"
        )
    of_experts = card.experts > 0 and set(adapter.selected(possible)) & set(OF_MLPS)
    if of_experts and parallel.etp > 1:
        raise ConfigError(
            f"parallel.etp={parallel.etp} with adapters on experts (model.adapter.targets: "
            f"{sorted(of_experts)[0]}): Megatron-Bridge (0.6.2) computes another function there; use "
            f"parallel.etp=1, or targets={list(_ATTENTION)}"
        )
    if model.fp8 is not None:
        raise ConfigError(
            f"model.fp8.recipe={model.fp8.recipe} with model.adapter: adapters on FP8 layers have not "
            "been proven; leave one of them out"
        )
