"""Decides from config.json alone if a model can be trained, and if the trainer can hold its weights.

Megatron-Bridge builds a model from the keys that it knows. If a key changes the model and Megatron-Bridge
ignores it, the result is silently another model. This module refuses such a config.json, and its error names
the value that Megatron-Bridge assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import DENSE_FIRST, ModelCard, is_positive, shown
from megatron_gvpo.huggingface.image_families import FAMILIES

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
    "Glm4MoeForCausalLM": {"hidden_act": "silu", "n_shared_experts": 1, "norm_topk_prob": True},
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
        "swiglu_alpha": 1.702,
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
# The only order of layers that Megatron-Bridge builds: (kind of most layers, n), where every n-th layer has
# full attention.
_ORDERS: dict[str, tuple[str, int]] = {
    "Exaone4ForCausalLM": ("full_attention", 1),
    "ExaoneMoeForCausalLM": ("sliding_attention", 4),
    "Gemma3ForCausalLM": ("sliding_attention", 6),
    "GptOssForCausalLM": ("sliding_attention", 2),
    "Qwen3NextForCausalLM": ("linear_attention", 4),
    "Qwen3_5ForCausalLM": ("linear_attention", 4),
    "Qwen3_5MoeForCausalLM": ("linear_attention", 4),
}
# The only values of GPT-OSS's YaRN that Megatron-Bridge builds; it ignores config.json's.
_GPT_OSS_YARN = {
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
}
# Families that rotate a part of every head, which transformers (5.19) reads in `rope_parameters`.
PARTLY_ROTATED = (
    "Glm4MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
# The only values of llama3's rope parameters that megatron-core implements. It accepts any `factor`.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def check_family(values: Mapping[str, Any], where: str) -> str:
    """Returns the architecture that a config.json names, one of ARCHITECTURES.

    `values`: a `ModelCard`, or the keys and values of a config.json. Raises ConfigError, which begins with
    `where`, if the model is not supported.
    """
    card = ModelCard(values)
    architecture = _supported(card, where)
    card.check_values(where)
    _check_assumed(card, architecture, where)
    _check_rope(card, architecture, where)
    _check_order(card, architecture, where)
    _check_dense_layers(card, architecture, where)
    _check_window(card, where)
    _check_groups(card, where)
    return architecture


def _supported(card: ModelCard, where: str) -> str:
    named = card.architectures
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"{where}: architectures in config.json is not a list of names")
    if len(named) > 1:
        raise ConfigError(
            f"{where}: architectures in config.json names {len(named)} models ({', '.join(named)[:200]}): "
            "leave the one whose weights are there"
        )
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
    return architecture


def _check_assumed(card: ModelCard, architecture: str, where: str) -> None:
    """Raises ConfigError if a key that Megatron-Bridge ignores has another value than it assumes."""
    for key, assumed in ARCHITECTURES[architecture].items():
        value = card.get(key)
        if architecture == "GemmaForCausalLM" and (key, value) == ("hidden_act", "gelu"):
            continue  # this is Gemma 1's name for gelu_pytorch_tanh
        if value not in (assumed, None):
            raise ConfigError(
                f"{where}: {key}={value} in config.json; Megatron-Bridge builds {architecture} with "
                f"{key}={assumed} only"
            )
    if card.is_mla and card.get("q_lora_rank", 0) is None:
        raise ConfigError(
            f"{where}: q_lora_rank=null in config.json (DeepSeek-V2-Lite); megatron-core normalizes the "
            "input of the query projection once more than the model does"
        )


def _check_rope(card: ModelCard, architecture: str, where: str) -> None:
    rope = card.get("rope_parameters") or card.get("rope_scaling") or {}
    if card.get("rope_scaling") and rope != card["rope_scaling"]:
        raise ConfigError(
            f"{where}: rope_parameters and rope_scaling in config.json differ, and transformers takes "
            "rope_scaling alone, with its default for a rope_theta that is not there: put all of them into "
            "rope_parameters"
        )
    if not isinstance(rope, dict):
        raise ConfigError(
            f"{where}: the rope parameters in config.json are not an object of names and values"
        )
    for name in ("rope_theta", "factor"):
        value = rope.get(name)
        if value is not None and not is_positive(value):
            raise ConfigError(f"{where}: {name}={shown(value)} in config.json: expected a positive number")
    share = rope.get("partial_rotary_factor", card.get("partial_rotary_factor"))
    if share not in (None, 1) and architecture not in PARTLY_ROTATED:
        raise ConfigError(
            f"{where}: partial_rotary_factor={shown(share)} of the rope in config.json; Megatron-Bridge "
            f"builds {architecture} with 1 only"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if architecture == "GptOssForCausalLM":
        _check_gpt_oss_rope({**rope, "rope_type": kind}, where)
        return
    tables = [value for value in rope.values() if isinstance(value, dict)]  # one for each kind of layer
    kind = next((kind for table in tables if (kind := table.get("rope_type", "default")) != "default"), kind)
    known = _rope_types(card, architecture)
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
    if kind == "yarn":
        _check_yarn(rope, where)


def _rope_types(card: ModelCard, architecture: str) -> list[str]:
    """The types of rope that Megatron-Bridge builds for the architecture."""
    if card.is_mla and architecture != "Glm4MoeLiteForCausalLM":
        return ["default", "yarn"]
    if architecture in ("Exaone4ForCausalLM", "LlamaForCausalLM"):
        return ["default", "llama3"]
    # `mrope` is the former name of `default` with a mrope_section.
    return ["default", "mrope"] if architecture in FAMILIES else ["default"]


def _check_gpt_oss_rope(rope: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError unless YaRN has the values that Megatron-Bridge assumes."""
    for name, value in {"rope_type": "yarn", **_GPT_OSS_YARN}.items():
        if rope.get(name) != value:
            raise ConfigError(
                f"{where}: {name}={shown(rope.get(name))} of the rope in config.json; Megatron-Bridge builds "
                f"GptOssForCausalLM with {value} only"
            )


def _check_yarn(rope: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for parameters of latent attention's YaRN that Megatron-Bridge ignores or misreads.

    transformers takes `mscale` and `mscale_all_dim` if both are given, and 1 and 0 otherwise.
    """
    for name, assumed in (("attention_factor", None), ("truncate", True)):
        if (value := rope.get(name)) not in (assumed, None):
            raise ConfigError(
                f"{where}: {name}={shown(value)} of the YaRN rope in config.json; Megatron-Bridge builds the "
                f"model without it"
            )
    scale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if bool(scale) != bool(of_all) and (scale, of_all or 0) != (1, 0):
        raise ConfigError(
            f"{where}: mscale={shown(scale)} and mscale_all_dim={shown(of_all)} of the YaRN rope in "
            "config.json, of which transformers takes both or none: give both, or neither"
        )


def _check_order(card: ModelCard, architecture: str, where: str) -> None:
    """Raises ConfigError if the layers' kinds of attention have another order than Megatron-Bridge builds."""
    if architecture not in _ORDERS:
        return
    most, every = _ORDERS[architecture]
    if architecture == "Exaone4ForCausalLM" and "sliding_window" not in card:
        raise ConfigError(
            f"{where}: no sliding_window in config.json, and transformers takes 4096; {architecture} is "
            'supported with "sliding_window": null only'
        )
    for name in ("full_attention_interval", "sliding_window_pattern"):
        interval = card.get(name, every)
        if interval not in (every, "L" * (every - 1) + "G", None) and (interval != 0 or every > 1):
            raise ConfigError(f"{where}: {name}={shown(interval)} in config.json; supported: {every}")
    wanted = ["full_attention" if (i + 1) % every == 0 else most for i in range(card["num_hidden_layers"])]
    if card.get("layer_types") not in (None, wanted):
        raise ConfigError(
            f"{where}: layer_types in config.json; {architecture} is supported with full_attention in every "
            f"{every}th layer and {most} in the others"
        )


def _check_dense_layers(card: ModelCard, architecture: str, where: str) -> None:
    """Raises ConfigError if transformers and Megatron-Bridge would take other layers for dense ones."""
    if architecture not in DENSE_FIRST:
        return
    if architecture == "HYV3ForCausalLM" and card.get("first_k_dense_replace") is None:
        raise ConfigError(
            f"{where}: no first_k_dense_replace in config.json, which Megatron-Bridge reads: add "
            '"first_k_dense_replace": 1'
        )
    dense, layers = card.dense_layers, card["num_hidden_layers"]
    for name, of_dense, of_sparse in (("mlp_layer_types", "dense", "sparse"), ("is_moe_layer", False, True)):
        wanted = [of_dense if i < dense else of_sparse for i in range(layers)]
        if card.get(name) not in (None, wanted):
            raise ConfigError(
                f"{where}: {name} in config.json; {architecture} is supported with the first {dense} of "
                f"{layers} layers dense (first_k_dense_replace) and experts in the others"
            )


def _check_window(card: ModelCard, where: str) -> None:
    """Raises ConfigError for a sliding window that Megatron-Bridge ignores.

    Mistral's window applies to all layers and is supported. Qwen's window may begin at some layer;
    Megatron-Bridge ignores it.
    """
    first, layers = card.get("max_window_layers"), card["num_hidden_layers"]
    if first is None:
        first = 28  # transformers' default
    if card.experts:
        first = 0
    if not (card.get("use_sliding_window") and card.get("sliding_window")):
        return
    if not card.experts and isinstance(kinds := card.get("layer_types"), list):  # go before max_window_layers
        first = kinds.index("sliding_attention") if "sliding_attention" in kinds else layers
    if first < layers:
        raise ConfigError(
            f"{where}: use_sliding_window=true in config.json, from layer {first} of {layers}; "
            "Megatron-Bridge would build the model without the window"
        )


def _check_groups(card: ModelCard, where: str) -> None:
    """Raises ConfigError if the allowed groups have fewer experts than a token needs.

    DeepSeek-V2 and V3 divide their experts into groups, and route a token to its best groups only.
    """
    groups, chosen = card.get("n_group") or 1, card.get("num_experts_per_tok") or 1
    if card.experts and chosen > card.experts:
        raise ConfigError(f"{where}: num_experts_per_tok={chosen} of {card.experts} experts in config.json")
    if groups == 1 or card.get("topk_method") == "greedy":
        return
    allowed = card.get("topk_group") or 1
    if card.experts % groups or allowed > groups or chosen > allowed * (card.experts // groups):
        raise ConfigError(
            f"{where}: num_experts_per_tok={chosen} of topk_group={allowed} of n_group={groups} groups of "
            f"{card.experts} experts in config.json; there are not enough experts in these groups"
        )


# Values of `model_type` that transformers does not know, although it has the model under another name. A
# released config.json has the first, with the architecture and the weights' names of the second.
SAME_MODEL = {"kimi_k2": "deepseek_v3"}


def add_model_types() -> None:
    """Let transformers read the models of SAME_MODEL. Loads transformers."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for named, same in SAME_MODEL.items():
        CONFIG_MAPPING.register(named, CONFIG_MAPPING[same], exist_ok=True)
        # Conversions of the files' tensors to those in memory.
        files = get_checkpoint_conversion_mapping(same)
        register_checkpoint_conversion_mapping(named, files, overwrite=True)


# Architectures that Megatron-Bridge (0.6.2) builds and training refuses, each with the fault.
# The numbers are those of `megatron-gvpo verify` in one process, on a tiny model with the defaults of
# transformers (5.19), with this package's CPU stand-ins for Transformer Engine's layers.
_NO_REFERENCE = "transformers has no implementation of its own to compare with"
_HYBRID = "megatron-core (0.19.2) builds it as HybridModel, which has no hook for the fused head"
_ON_CPU = "has no stand-in for a CPU, where models are compared"
_INPUTS = "it takes images, videos or audio; with images, Qwen2.5-VL and Qwen3-VL (dense) are trained"
_CAPPED = "its logits are capped (final_logit_softcapping), and the fused head does not cap"
REFUSED: dict[str, str] = {
    "BailingMoeV2ForCausalLM": _NO_REFERENCE,
    "DeciLMForCausalLM": _NO_REFERENCE,
    "DeepseekV4ForCausalLM": f"its attention (dsv4_hybrid of megatron-core 0.19.2) {_ON_CPU}",
    "Ernie4_5_MoeForCausalLM": (
        "log-probs differ by up to 0.62 nats from those of transformers: Megatron-Bridge scores experts by a "
        "sigmoid, transformers by a softmax"
    ),
    "ExaoneMoEForCausalLM": "transformers spells it ExaoneMoeForCausalLM: write that into config.json",
    "FalconH1ForCausalLM": "Megatron-Bridge builds it as FalconH1Model, which has no hook for the fused head",
    "Gemma2ForCausalLM": _CAPPED,
    "Gemma4ForCausalLM": f"{_CAPPED}; its layers' own embeddings and shared keys have no stand-in for a CPU",
    "GlmMoeDsaForCausalLM": f"its sparse attention (DSA of megatron-core 0.19.2) {_ON_CPU}",
    "KimiK2ForCausalLM": (
        "transformers has no such architecture; the released Kimi K2 names DeepseekV3ForCausalLM, which is "
        "supported"
    ),
    "MiMoForCausalLM": _NO_REFERENCE,
    "MiMoV2FlashForCausalLM": (
        "Megatron-Bridge reads swa_rope_theta, which the configuration of transformers does not have"
    ),
    "Ministral3ForCausalLM": "Megatron-Bridge has it only with its vision tower",
    "NemotronForCausalLM": (
        "its LayerNorms have no stand-in for a CPU; with an RMSNorm in their place log-probs differ by up to "
        "3.1 nats from those of transformers"
    ),
    "NemotronHForCausalLM": _HYBRID,
    "Olmo2ForCausalLM": "Megatron-Bridge (0.6.2) has OLMoE alone of the OLMo models",
    "Olmo3ForCausalLM": "Megatron-Bridge (0.6.2) has OLMoE alone of the OLMo models",
    "SarvamMLAForCausalLM": _NO_REFERENCE,
    "SarvamMoEForCausalLM": _NO_REFERENCE,
    "Step3p5ForCausalLM": _NO_REFERENCE,
    **dict.fromkeys(
        (
            "Ernie4_5_VLMoeForConditionalGeneration",
            "Exaone4_5_ForConditionalGeneration",
            "Gemma3ForConditionalGeneration",
            "Gemma4ForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
            "KimiK25ForConditionalGeneration",
            "MiniMaxM3SparseForConditionalGeneration",
            "Mistral3ForConditionalGeneration",
            "NemotronH_Nano_Omni_Reasoning_V3",
            "NemotronH_Nano_VL_V2",
            "Qwen2AudioForConditionalGeneration",
            "Qwen2_5OmniForConditionalGeneration",
            "Qwen3ASRForConditionalGeneration",
            "Qwen3OmniMoeForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Step3p7ForConditionalGeneration",
        ),
        _INPUTS,
    ),
}


# The names under which transformers knows each of ARCHITECTURES (`model_type`).
MODEL_TYPES: dict[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": ("deepseek_v2",),
    "DeepseekV3ForCausalLM": ("deepseek_v3",),
    "Exaone4ForCausalLM": ("exaone4",),
    "ExaoneMoeForCausalLM": ("exaone_moe",),
    "GemmaForCausalLM": ("gemma",),
    "Gemma3ForCausalLM": ("gemma3_text",),
    "Glm4MoeForCausalLM": ("glm4_moe",),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite",),
    "GptOssForCausalLM": ("gpt_oss",),
    "HYV3ForCausalLM": ("hy_v3",),
    "LlamaForCausalLM": ("llama",),
    "MiniMaxM2ForCausalLM": ("minimax_m2",),
    "MistralForCausalLM": ("mistral",),
    "OlmoeForCausalLM": ("olmoe",),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl",),
    "Qwen3ForCausalLM": ("qwen3",),
    "Qwen3MoeForCausalLM": ("qwen3_moe",),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl",),
    "Qwen3NextForCausalLM": ("qwen3_next",),
    "Qwen3_5ForCausalLM": ("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe", "qwen3_5_moe_text"),
}


def check_trainable(model: dict[str, Any], where: str) -> str:
    """Returns the architecture of a config.json whose weights the trainer is to hold, one of ARCHITECTURES.

    Raises ConfigError, which begins with `where`, if the model is not supported (`check_family`), is a Python
    file of the checkpoint, is another one by `model_type` than by `architectures`, or is quantised.
    """
    architecture = check_family(model, where)
    _check_code(model, architecture, where)
    _check_model_type(model, architecture, where)
    for key in ("quantization_config", "compression_config"):
        if (how := model.get(key)) is not None:
            method = how.get("quant_method") if isinstance(how, dict) else how
            raise ConfigError(
                f"{where}: {key} (quant_method {shown(method)}) in config.json, and training needs weights "
                "in bfloat16 or float32: give the model that was quantised, or remove the "
                "key if these weights are not"
            )
    return architecture


def _check_model_type(model: dict[str, Any], architecture: str, where: str) -> None:
    """Raises ConfigError unless `model_type`, by which transformers reads it, is that of the architecture.

    An architecture that a user registers has no entry in MODEL_TYPES, and is not compared.
    """
    kind, known = model.get("model_type"), MODEL_TYPES.get(architecture)
    if kind is None or known is None or (isinstance(kind, str) and SAME_MODEL.get(kind, kind) in known):
        return
    raise ConfigError(
        f"{where}: model_type={shown(kind)} and architectures={architecture} in config.json are two models: "
        f"the model_type of {architecture} is {' or '.join(known)}"
    )


def _check_code(model: dict[str, Any], architecture: str, where: str) -> None:
    """Raises ConfigError if auto_map names another class for the model than the architecture's.

    Many released models still contain Python files although transformers now has their architecture.
    """
    code = model.get("auto_map")
    if not isinstance(code, dict):  # transformers ignores values of other types
        return
    for key in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        named = code.get(key, architecture)
        if not isinstance(named, str) or named.rpartition(".")[2] != architecture:
            raise ConfigError(
                f"{where}: auto_map in config.json names {shown(named)}, a Python file of the checkpoint, "
                "for the model; the trainer runs none (model.trust_remote_code is for tokenizers and "
                f"servers): remove auto_map if the model is transformers' {architecture}"
            )
