"""Decides from config.json alone if a model can be trained.

Megatron-Bridge builds a model from the keys that it knows. If a key changes the model and Megatron-Bridge
ignores it, the result is silently another model. This module refuses such a config.json, and its error names
the value that Megatron-Bridge assumes.
"""

from __future__ import annotations

from typing import Any

from megatron_gvpo.config.errors import ConfigError

# Architectures whose log-probs, gradients and round trip are compared with transformers
# (tests/megatron/test_gradient_invariance.py). Each maps the keys that Megatron-Bridge (0.6.2) ignores to the
# values that it assumes, which are also the defaults of transformers.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"attention_bias": False, "moe_layer_freq": 1, "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": {
        "attention_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {"hidden_act": "silu"},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"attention_bias": False},
    "Qwen3MoeForCausalLM": {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
# The only values of llama3's rope parameters that megatron-core implements. It accepts any `factor`.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def experts(model: dict[str, Any]) -> int:
    """Returns the number of routed experts in a config.json; 0 for a dense model."""
    return int(next((model[name] for name in _EXPERTS if model.get(name)), 0))


def check_family(model: dict[str, Any], where: str) -> str:
    """Returns the architecture that a config.json names, one of ARCHITECTURES.

    Raises ConfigError, which begins with `where`, if the model is not supported.
    """
    named = model.get("architectures") or []
    architecture = next((name for name in named if name in ARCHITECTURES), None)
    if architecture is None:
        raise ConfigError(
            f"{where}: architecture {', '.join(named) or 'not named'} in config.json; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    for key, assumed in ARCHITECTURES[architecture].items():
        if model.get(key, assumed) not in (assumed, None):
            raise ConfigError(
                f"{where}: {key}={model[key]} in config.json; Megatron-Bridge builds {architecture} with "
                f"{key}={assumed} only"
            )
    if model.get("kv_lora_rank") and "q_lora_rank" in model and model["q_lora_rank"] is None:
        raise ConfigError(
            f"{where}: q_lora_rank=null in config.json (DeepSeek-V2-Lite); megatron-core normalizes the "
            "input of the query projection once more than the model does"
        )
    _check_rope(model, architecture, where)
    _check_window(model, where)
    _check_groups(model, where)
    return architecture


def _check_rope(model: dict[str, Any], architecture: str, where: str) -> None:
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = ["default"]
    if model.get("kv_lora_rank"):
        known.append("yarn")
    elif architecture == "LlamaForCausalLM":
        known.append("llama3")
    if kind not in known:
        raise ConfigError(
            f"{where}: rope_type={kind} in config.json; supported for this architecture: {', '.join(known)}"
        )
    for name, value in _LLAMA3_ROPE.items() if kind == "llama3" else ():
        if rope.get(name, value) != value:
            raise ConfigError(
                f"{where}: {name}={rope[name]} of the llama3 rope in config.json; megatron-core has it with "
                f"{value} only"
            )


def _check_window(model: dict[str, Any], where: str) -> None:
    """Raises ConfigError for a sliding window that Megatron-Bridge ignores.

    Mistral's window applies to all layers and is supported. Qwen's may begin at some layer and is ignored.
    """
    first, layers = model.get("max_window_layers", 28), model.get("num_hidden_layers", 0)
    if experts(model):
        first = 0
    if model.get("use_sliding_window") and model.get("sliding_window") and first < layers:
        raise ConfigError(
            f"{where}: use_sliding_window=true in config.json, from layer {first} of {layers}; "
            "Megatron-Bridge would build the model without the window"
        )


def _check_groups(model: dict[str, Any], where: str) -> None:
    """Raises ConfigError if the allowed groups have fewer experts than a token needs.

    DeepSeek-V2 and V3 divide their experts into groups, and route a token to its best groups only.
    """
    groups, chosen = model.get("n_group") or 1, model.get("num_experts_per_tok") or 1
    if groups == 1 or model.get("topk_method") == "greedy":
        return
    allowed = model.get("topk_group") or 1
    if experts(model) % groups or allowed > groups or chosen > allowed * (experts(model) // groups):
        raise ConfigError(
            f"{where}: num_experts_per_tok={chosen} of topk_group={allowed} of n_group={groups} groups of "
            f"{experts(model)} experts in config.json; there are not enough experts in these groups"
        )
