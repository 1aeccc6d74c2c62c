"""Decides from config.json alone if a model can be trained.

Megatron-Bridge builds a model from the keys that it knows. If a key changes the model and Megatron-Bridge
ignores it, the result is silently another model. This module refuses such a config.json, and its error names
the value that Megatron-Bridge assumes.
"""

from __future__ import annotations

from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.real_number import finite_number
from megatron_gvpo.huggingface.image_families import FAMILIES
from megatron_gvpo.huggingface.refused import REFUSED

# Architectures whose log-probs, gradients and round trip are compared with transformers
# (tests/megatron/test_gradient_invariance.py, test_families.py). Each maps the keys that Megatron-Bridge
# (0.6.2) ignores to the values that it assumes, which are also the defaults of transformers.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"attention_bias": False, "moe_layer_freq": 1, "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": {
        "attention_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
    "Exaone4ForCausalLM": {"hidden_act": "silu", "sliding_window": None, "tie_word_embeddings": True},
    "ExaoneMoeForCausalLM": {
        "hidden_act": "silu",
        "n_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
    },
    "GemmaForCausalLM": {
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
    },
    "Gemma3ForCausalLM": {
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
    },
    "Glm4MoeForCausalLM": {"hidden_act": "silu", "norm_topk_prob": True},
    "Glm4MoeLiteForCausalLM": {
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "rope_interleave": True,
        "tie_word_embeddings": False,
    },
    "GptOssForCausalLM": {
        "attention_bias": True,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    "HYV3ForCausalLM": {
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "MiniMaxM2ForCausalLM": {"hidden_act": "silu", "tie_word_embeddings": False},
    "MistralForCausalLM": {"hidden_act": "silu"},
    "OlmoeForCausalLM": {
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_act": "silu",
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
    },
    "Qwen2ForCausalLM": {},
    "Qwen2_5_VLForConditionalGeneration": {},
    "Qwen3ForCausalLM": {"attention_bias": False},
    "Qwen3MoeForCausalLM": {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "Qwen3VLForConditionalGeneration": {"attention_bias": False},
    "Qwen3NextForCausalLM": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "Qwen3_5ForCausalLM": {"attention_bias": False, "attn_output_gate": True, "hidden_act": "silu"},
    "Qwen3_5MoeForCausalLM": {"attention_bias": False, "attn_output_gate": True, "hidden_act": "silu"},
}
# (kind of most layers, every how many layers one has full attention): the only order that is built.
_ORDERS: dict[str, tuple[str, int]] = {
    "Exaone4ForCausalLM": ("full_attention", 1),
    "ExaoneMoeForCausalLM": ("sliding_attention", 4),
    "Gemma3ForCausalLM": ("sliding_attention", 6),
    "GptOssForCausalLM": ("sliding_attention", 2),
    "Qwen3NextForCausalLM": ("linear_attention", 4),
    "Qwen3_5ForCausalLM": ("linear_attention", 4),
    "Qwen3_5MoeForCausalLM": ("linear_attention", 4),
}
# Architectures whose first layers are dense, one where config.json does not say how many.
_DENSE_FIRST = ("ExaoneMoeForCausalLM", "Glm4MoeLiteForCausalLM", "HYV3ForCausalLM")
# The only values of GPT-OSS's YaRN that Megatron-Bridge builds; it ignores config.json's.
_GPT_OSS_YARN = {
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
# The only values of llama3's rope parameters that megatron-core implements. It accepts any `factor`.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
# The largest value of each whole number, far beyond any model; the least is 1, or 0 for those in _ZERO.
_LARGEST = {
    "hidden_size": 1 << 20,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
    "max_window_layers": 10_000,
    "num_experts": 1 << 20,
    "n_routed_experts": 1 << 20,
    "num_local_experts": 1 << 20,
    "num_experts_per_tok": 1 << 20,
    "n_shared_experts": 1 << 20,
    "num_shared_experts": 1 << 20,
    "n_group": 1 << 20,
    "topk_group": 1 << 20,
    "first_k_dense_replace": 10_000,
    "num_nextn_predict_layers": 10_000,
    "q_lora_rank": 1 << 20,
    "kv_lora_rank": 1 << 20,
    "qk_rope_head_dim": 1 << 16,
    "qk_nope_head_dim": 1 << 16,
    "v_head_dim": 1 << 16,
    "linear_num_key_heads": 1 << 16,
    "linear_num_value_heads": 1 << 16,
    "linear_key_head_dim": 1 << 16,
    "linear_value_head_dim": 1 << 16,
    "linear_conv_kernel_dim": 64,
    "shared_expert_intermediate_size": 1 << 24,
}
_ZERO = {
    "max_window_layers",
    "n_shared_experts",
    "num_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
}
_POSITIVE = ("rms_norm_eps", "rope_theta", "initializer_range", "routed_scaling_factor")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob")


def experts(model: dict[str, Any]) -> int:
    """Returns the number of routed experts in a config.json; 0 for a dense model."""
    return int(next((model[name] for name in _EXPERTS if model.get(name)), 0))


def dense_layers(model: dict[str, Any]) -> int:
    """Returns how many of the first layers have no experts, by the config.json of a mixture of experts."""
    named = model.get("architectures") or ()
    default = 1 if any(name in _DENSE_FIRST for name in named) else 0
    given = model.get("first_k_dense_replace")
    return default if given is None else int(given)


def check_family(model: dict[str, Any], where: str) -> str:
    """Returns the architecture that a config.json names, one of ARCHITECTURES.

    Raises ConfigError, which begins with `where`, if the model is not supported.
    """
    named = model.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"{where}: architectures in config.json is no list of names")
    architecture = next((name for name in named if name in ARCHITECTURES), None)
    if architecture is None:
        if (refused := next((name for name in named if name in REFUSED), None)) is not None:
            raise ConfigError(
                f"{where}: architecture {refused} in config.json is refused: {REFUSED[refused]}"
            )
        raise ConfigError(
            f"{where}: architecture {', '.join(named) or 'not named'} in config.json; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    _check_sizes(model, where)
    if architecture == "GemmaForCausalLM" and model.get("hidden_act") == "gelu":  # as the first release says
        model = model | {"hidden_act": "gelu_pytorch_tanh"}
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
    _check_order(model, architecture, where)
    _check_dense_layers(model, architecture, where)
    _check_window(model, where)
    _check_groups(model, where)
    return architecture


def _check_sizes(model: dict[str, Any], where: str) -> None:
    """Raises ConfigError if a value of config.json cannot be right.

    transformers takes its own default for a key that is missing, and a layer of another size for a wrong one.
    If no shape of a weight shows it, such as the number of heads, the result is silently another model.
    """

    def refuse(key: str, said: str) -> ConfigError:
        return ConfigError(f"{where}: {key}={shown(model[key])} in config.json{said}")

    required = [
        key for key in _REQUIRED if key != "intermediate_size" or not model.get("moe_intermediate_size")
    ]
    if absent := [key for key in required if model.get(key) is None]:
        raise ConfigError(f"{where}: no {', '.join(absent)} in config.json")
    for key, largest in _LARGEST.items():
        if (value := model.get(key)) is None:
            continue
        if type(value) is not int:
            raise refuse(key, ": expected a whole number")
        if value < (least := 0 if key in _ZERO else 1):
            raise refuse(key, f": must be at least {least}")
        if value > largest:
            raise refuse(key, f": must be at most {largest}")
    if experts(model) and model.get("moe_intermediate_size", 1) is None:
        raise ConfigError(f"{where}: moe_intermediate_size=null in config.json: the model has experts")
    for key in _POSITIVE:
        value = model.get(key)
        if value is not None and not _is_positive(value):
            raise refuse(key, ": expected a positive number")
    for key in _SWITCHES:
        if not isinstance(model.get(key), bool | None):
            raise refuse(key, ": expected true or false")
    heads, hidden, groups = (
        model["num_attention_heads"],
        model["hidden_size"],
        model.get("num_key_value_heads"),
    )
    if model.get("kv_lora_rank"):  # the sizes of latent attention's heads have keys of their own
        return
    if model.get("head_dim") is None and hidden % heads:
        raise refuse("num_attention_heads", f" does not divide hidden_size={hidden}")
    if groups and heads % groups:
        raise refuse("num_key_value_heads", f" does not divide num_attention_heads={heads}")
    if (size := model.get("head_dim") or hidden // heads) % 2:
        raise ConfigError(f"{where}: heads of {size} elements in config.json, which RoPE cannot halve")


def _is_positive(value: Any) -> bool:
    return (number := finite_number(value)) is not None and number > 0


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _check_rope(model: dict[str, Any], architecture: str, where: str) -> None:
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{where}: the rope parameters in config.json are no object of names and values")
    for name in ("rope_theta", "factor"):
        value = rope.get(name)
        if value is not None and not _is_positive(value):
            raise ConfigError(f"{where}: {name}={shown(value)} in config.json: expected a positive number")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if architecture == "GptOssForCausalLM":
        for name, value in {"rope_type": "yarn", **_GPT_OSS_YARN}.items():
            if (found := kind if name == "rope_type" else rope.get(name)) != value:
                raise ConfigError(
                    f"{where}: {name}={shown(found)} of the rope in config.json; Megatron-Bridge builds "
                    f"{architecture} with {value} only"
                )
        return
    tables = [value for value in rope.values() if isinstance(value, dict)]  # one for each kind of layer
    kind = next((kind for table in tables if (kind := table.get("rope_type", "default")) != "default"), kind)
    known = ["default"]
    if model.get("kv_lora_rank") and architecture != "Glm4MoeLiteForCausalLM":
        known.append("yarn")
    elif architecture in ("Exaone4ForCausalLM", "LlamaForCausalLM"):
        known.append("llama3")
    elif architecture in FAMILIES:
        known.append("mrope")  # the former name of default with a mrope_section
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


def _check_order(model: dict[str, Any], architecture: str, where: str) -> None:
    """Raises ConfigError if the kinds of attention follow each other in an order that is not built."""
    if architecture not in _ORDERS:
        return
    most, every = _ORDERS[architecture]
    if architecture == "Exaone4ForCausalLM" and "sliding_window" not in model:
        raise ConfigError(
            f"{where}: no sliding_window in config.json, and transformers takes 4096; {architecture} is "
            'supported with "sliding_window": null only'
        )
    for name in ("full_attention_interval", "sliding_window_pattern"):
        interval = model.get(name, every)
        if interval not in (every, "L" * (every - 1) + "G", None) and (interval != 0 or every > 1):
            raise ConfigError(f"{where}: {name}={shown(interval)} in config.json; supported: {every}")
    wanted = ["full_attention" if (i + 1) % every == 0 else most for i in range(model["num_hidden_layers"])]
    if (given := model.get("layer_types")) is not None and given != wanted:
        raise ConfigError(
            f"{where}: layer_types in config.json; {architecture} is supported with full_attention in every "
            f"{every}th layer and {most} in the others"
        )


def _check_dense_layers(model: dict[str, Any], architecture: str, where: str) -> None:
    """Raises ConfigError if transformers and Megatron-Bridge would take other layers for dense ones."""
    if architecture not in _DENSE_FIRST:
        return
    if architecture == "HYV3ForCausalLM" and model.get("first_k_dense_replace") is None:
        raise ConfigError(
            f"{where}: no first_k_dense_replace in config.json, which Megatron-Bridge reads: add "
            '"first_k_dense_replace": 1'
        )
    dense, layers = dense_layers(model), model["num_hidden_layers"]
    for name, of_dense, of_sparse in (("mlp_layer_types", "dense", "sparse"), ("is_moe_layer", False, True)):
        wanted = [of_dense if i < dense else of_sparse for i in range(layers)]
        if (given := model.get(name)) is not None and given != wanted:
            raise ConfigError(
                f"{where}: {name} in config.json; {architecture} is supported with the first {dense} of "
                f"{layers} layers dense (first_k_dense_replace) and experts in the others"
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
    if experts(model) and chosen > experts(model):
        raise ConfigError(f"{where}: num_experts_per_tok={chosen} of {experts(model)} experts in config.json")
    if groups == 1 or model.get("topk_method") == "greedy":
        return
    allowed = model.get("topk_group") or 1
    if experts(model) % groups or allowed > groups or chosen > allowed * (experts(model) // groups):
        raise ConfigError(
            f"{where}: num_experts_per_tok={chosen} of topk_group={allowed} of n_group={groups} groups of "
            f"{experts(model)} experts in config.json; there are not enough experts in these groups"
        )


# Values of `model_type` in config.json that transformers does not know, of models that it has.

# The released config.json has the first, and the architecture and the weights' names of the second.
SAME_MODEL = {"kimi_k2": "deepseek_v3"}


def add_model_types() -> None:
    """Let transformers read these models. Loads transformers."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for named, same in SAME_MODEL.items():
        CONFIG_MAPPING.register(named, CONFIG_MAPPING[same], exist_ok=True)
        files = get_checkpoint_conversion_mapping(same)  # how the files' tensors become those in memory
        register_checkpoint_conversion_mapping(named, files, overwrite=True)
