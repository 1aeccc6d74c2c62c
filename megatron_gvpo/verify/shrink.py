"""Shrinks a config.json to a tiny one of the same architecture.

Sizes shrink. Everything that makes the architecture stays: kinds of attention and their order over the
layers, rope, norms, biases, tied embeddings, experts with their groups, and the ratios between heads.
"""

from __future__ import annotations

import json
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import SAME_MODEL, add_model_types
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.image_families import takes_images

VOCABULARY = 131  # prime: tensor parallelism must pad it
_MOST_LAYERS = 12
# Keys of sizes that do not depend on others, and their sizes in the tiny model; absent and null keys stay so.
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
        has_one_size = config["intermediate_size"] == config.get("hidden_size")
        tiny["intermediate_size"] = tiny["hidden_size"] if has_one_size else 48
    _shrink_heads(config, tiny)
    _shrink_experts(config, tiny)
    _shrink_depth(config, tiny, where)
    return tiny


def _shrink_heads(config: dict[str, Any], tiny: dict[str, Any]) -> None:
    """Keep multi-head, multi-query or grouped attention, with or without a head size of its own."""
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    tiny["num_attention_heads"] = 4
    if config.get("rotary_dim") and config.get("head_dim"):
        tiny["rotary_dim"] = tiny["head_dim"] * config["rotary_dim"] // config["head_dim"]
    if config.get("head_dim") and config.get("head_dim") == config.get("qk_rope_head_dim"):
        tiny["head_dim"] = tiny["qk_rope_head_dim"]  # transformers' convention for latent attention
    if config.get("qk_head_dim"):
        tiny["qk_head_dim"] = tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
    if groups is not None:
        tiny["num_key_value_heads"] = 4 if groups == heads else min(groups, 2)
    keys, values = config.get("linear_num_key_heads"), config.get("linear_num_value_heads")
    if keys and values:
        tiny["linear_num_key_heads"] = 2
        tiny["linear_num_value_heads"] = 2 if keys == values else 4


def _shrink_experts(config: dict[str, Any], tiny: dict[str, Any]) -> None:
    """Keep groups of experts, and the number of experts that a token takes from a group."""
    count = ModelCard(config).experts
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


# Writes a checkpoint with random weights for a shrunk config.json.


def save_tiny(config: dict[str, Any], directory: Path, where: str) -> None:
    """Write a checkpoint with random weights for a shrunk config.json.

    Norms, biases and routers get values that are far from trivial. Raises ConfigError, which begins with
    `where`, if transformers cannot build the model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    add_model_types()
    try:
        hf_config = transformers.AutoConfig.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    except Exception as error:  # an unknown model_type, or sizes that contradict each other
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{where}: transformers builds no model of it: {type(error).__name__}: {reason}"
        ) from None
    scatter(model)
    transformers.utils.logging.disable_progress_bar()  # writing takes only a moment
    model.save_pretrained(directory)
    if (named := config.get("model_type")) in SAME_MODEL:  # transformers writes its own model_type
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": named}))


@torch.no_grad()
def scatter(model: torch.nn.Module) -> None:
    """Move norms, biases and other vectors away from their initial values, and spread the routers' scores."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name or not tensor.is_floating_point():
            continue
        if name.endswith("A_log"):  # decay rates that keep a state for several tokens
            tensor.uniform_(-3.0, 0.0)
        elif name.endswith(".sinks"):  # sinks take much attention, so that the gradient's norm shows them
            tensor.uniform_(1.0, 4.0)
        elif "norm" in name or "bias" in name or tensor.dim() == 1:
            tensor += 0.1 * torch.randn_like(tensor)
        elif name.endswith(("mlp.gate.weight", "router.weight")):
            tensor.normal_(std=0.5)


# Checks that transformers has the model that a config.json names, because the comparison needs it.


def check_known(config: dict[str, Any], named: str, where: str) -> None:
    """Raise ConfigError, which begins with `where`, unless `model_type` is that of the architecture `named`.

    The function loads transformers and torch, but no other large library.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if takes_images(config):
        raise ConfigError(
            f"{where}: {named} takes images, and this command compares models of text alone; "
            "docs/howto/images_in_prompts.md says how models with images were compared"
        )
    kind = config.get("model_type")
    kind = SAME_MODEL.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: model_type={kind!r} in config.json: expected a name, such as qwen3")
    if kind not in CONFIG_MAPPING_NAMES:
        close = get_close_matches(kind, list(CONFIG_MAPPING_NAMES), 1)
        raise ConfigError(
            f"{where}: model_type={kind} in config.json: transformers {transformers.__version__}, with which "
            f"models are compared, has no such model{f'; did you mean {close[0]}?' if close else ''}"
        )
    built = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if built is None:
        raise ConfigError(
            f"{where}: model_type={kind} in config.json: transformers has no causal language model of it, "
            "and this command compares no others"
        )
    if built != named:
        raise ConfigError(
            f"{where}: architectures={named} in config.json, but the causal language model of "
            f"model_type={kind} is {built}"
        )
