"""Decides from config.json alone if the trainer can hold a model's weights, beyond its architecture."""

from __future__ import annotations

from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import SAME_MODEL, check_family
from megatron_gvpo.huggingface.card import shown

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

    Released models that are transformers' own by now often keep the Python files from before.
    """
    code = model.get("auto_map")
    if not isinstance(code, dict):  # transformers takes no notice of others
        return
    for key in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        named = code.get(key, architecture)
        if not isinstance(named, str) or named.rpartition(".")[2] != architecture:
            raise ConfigError(
                f"{where}: auto_map in config.json names {shown(named)}, a Python file of the checkpoint, "
                "for the model; the trainer runs none (model.trust_remote_code is for tokenizers and "
                f"servers): remove auto_map if the model is transformers' {architecture}"
            )
