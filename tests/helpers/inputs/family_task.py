"""The tiny task with a model of one of the families, of sizes that engines' kernels for CPUs have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from helpers.cases.families import FAMILIES
from helpers.references import gradient_reference as reference
from megatron_gvpo.verify.shrink import save_tiny

_SIZES = {
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 128,  # as in the released models; vLLM's kernel for CPUs refuses 32
    "linear_value_head_dim": 128,
    "rotary_dim": 16,
    "max_position_embeddings": 512,
}
# vLLM's kernel for latent attention on CPUs has only the ranks of the released models.
_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "qk_head_dim": 96,
}
# The released models have these; the configurations of transformers do not.
_READ_BY_ENGINES: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "HYV3ForCausalLM": {"expert_hidden_dim": 32, "route_norm": True, "qk_norm": True},
    "MiniMaxM2ForCausalLM": {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
}
# Smaller than in the tiny models, whose large weights amplify bfloat16's rounding beyond the probe's limit.
_RANGE = {"bfloat16": 0.05}
_OF_TASK = ("vocab_size", "eos_token_id", "pad_token_id")


def make(task: Path, directory: Path, title: str, dtype: str = "float32") -> Path:
    """Copy `task` to `directory` with a model of random weights, run in `dtype`; returns `directory`.

    `title`: the family's name in the documentation.
    """
    shutil.copytree(task, directory)
    model, config = directory / "model", engine_config(title)
    dense = json.loads((model / "config.json").read_text())
    config |= {key: dense.get(key) for key in _OF_TASK} | {"bos_token_id": None}
    config["initializer_range"] = _RANGE.get(dtype, config["initializer_range"])
    (model / "model.safetensors").unlink()
    save_tiny(config, model, title)
    run = directory / "run.yaml"
    text = run.read_text().replace(str(task), str(directory))
    assert "dtype: float32" in text
    run.write_text(text.replace("dtype: float32", f"dtype: {dtype}"))
    return directory


def engine_config(title: str) -> dict[str, Any]:
    """The config.json of a tiny model of the family, of sizes that engines' kernels for CPUs have."""
    config = tiny_config(title)
    config |= _READ_BY_ENGINES.get(config["architectures"][0], {})
    sizes = _SIZES | (_LATENT if config.get("kv_lora_rank") else {})
    if not config.get("head_dim") and not config.get("kv_lora_rank"):
        sizes["hidden_size"] = config["num_attention_heads"] * sizes["head_dim"]
    return config | {key: size for key, size in sizes.items() if config.get(key) is not None}


def tiny_config(title: str) -> dict[str, Any]:
    """The config.json of the tiny model of the family whose gradients are compared."""
    for family in FAMILIES:
        if family.title == title:
            return family.tiny
    [name] = [name for name, its_title in reference.FAMILY_NAMES.items() if its_title == title]
    config = reference.CONFIGS[name]()
    architecture = type(config).__name__.replace("Config", "ForCausalLM")
    return {**config.to_dict(), "architectures": [architecture]}
