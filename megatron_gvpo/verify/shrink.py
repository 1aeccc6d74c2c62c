"""Shrinks a config.json to a tiny one of the same architecture.

Sizes shrink. Everything that makes the architecture stays: kinds of attention and their order over the
layers, rope, norms, biases, tied embeddings, experts with their groups, and the ratios between heads.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from megatron_gvpo.config.checks.supported_models import experts
from megatron_gvpo.config.errors import ConfigError

VOCABULARY = 131  # prime: tensor parallelism must pad it
_MOST_LAYERS = 12
# Keys of sizes that do not depend on others, and their sizes in the tiny model; absent and null ones stay so.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "head_dim": 16,
    "global_head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "sliding_window": 8,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Keys with a value for every layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "moe_layer_freq", "no_rope_layers", "layers_block_type")
_DROPPED = ("quantization_config", "auto_map", "transformers_version", "torch_dtype")


def shrink(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a config.json of the same architecture with tiny sizes.

    Raises ConfigError, which begins with `where`, if the order of the layers cannot be kept in few layers.
    """
    tiny = {key: deepcopy(value) for key, value in config.items() if key not in _DROPPED}
    for key, size in _SIZES.items():
        if tiny.get(key) is not None:
            tiny[key] = size
    tiny["dtype"] = "float32"
    tiny["initializer_range"] = 0.15
    if config.get("intermediate_size") is not None:
        same = config["intermediate_size"] == config.get("hidden_size")
        tiny["intermediate_size"] = tiny["hidden_size"] if same else 48
    _shrink_heads(config, tiny)
    _shrink_experts(config, tiny)
    _shrink_depth(config, tiny, where)
    return tiny


def _shrink_heads(config: dict[str, Any], tiny: dict[str, Any]) -> None:
    """Keep multi-head, multi-query or grouped attention, with a head size that is set apart or not."""
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    tiny["num_attention_heads"] = 4
    if config.get("rotary_dim") and config.get("head_dim"):
        tiny["rotary_dim"] = tiny["head_dim"] * config["rotary_dim"] // config["head_dim"]
    if config.get("head_dim") and config.get("head_dim") == config.get("qk_rope_head_dim"):
        tiny["head_dim"] = tiny["qk_rope_head_dim"]  # as transformers writes it for latent attention
    if config.get("qk_head_dim"):
        tiny["qk_head_dim"] = tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
    if groups is not None:
        tiny["num_key_value_heads"] = 4 if groups == heads else min(groups, 2)
    keys, values = config.get("linear_num_key_heads"), config.get("linear_num_value_heads")
    if keys and values:
        tiny["linear_num_key_heads"] = 2
        tiny["linear_num_value_heads"] = 2 if keys == values else 4


def _shrink_experts(config: dict[str, Any], tiny: dict[str, Any]) -> None:
    """Keep groups of experts, and how many experts a token takes of a group."""
    count = experts(config)
    if not count:
        return
    per_token = config.get("num_experts_per_tok") or config.get("experts_per_token") or 1
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups > 1:
        tiny["n_group"], tiny["topk_group"] = 4, 2
        per_token = 2 * max(1, min(2, per_token // chosen))
        count = 12
    else:
        per_token, count = min(2, per_token), 4
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if tiny.get(key):
            tiny[key] = count
    for key in ("num_experts_per_tok", "experts_per_token"):
        if tiny.get(key):
            tiny[key] = per_token
    if (tiny.get("n_shared_experts") or 0) > 1:
        tiny["n_shared_experts"] = 2


def _shrink_depth(config: dict[str, Any], tiny: dict[str, Any], where: str) -> None:
    """Keep the first layers: at least 4, an even number, among them every kind of layer."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ConfigError(f"{where}: no num_hidden_layers in config.json")
    orders = {key: config[key] for key in _PER_LAYER if isinstance(config.get(key), list)}
    if (dense := config.get("first_k_dense_replace")) is not None:
        tiny["first_k_dense_replace"] = min(dense, 1)
    interval = config.get("full_attention_interval") or config.get("sliding_window_pattern") or 1
    depth = max(4, interval if isinstance(interval, int) else 1)
    for key, order in orders.items():
        while depth < layers and set(map(str, order[:depth])) != set(map(str, order[:layers])):
            depth += 1
        if len(order) < layers:
            raise ConfigError(f"{where}: {key} in config.json has {len(order)} entries for {layers} layers")
    depth += depth % 2
    if depth > _MOST_LAYERS:
        raise ConfigError(
            f"{where}: the first {depth} layers of config.json are needed for all their kinds; a tiny model "
            f"has at most {_MOST_LAYERS}"
        )
    tiny["num_hidden_layers"] = depth
    for key, order in orders.items():
        tiny[key] = (list(order) + list(order))[:depth]
