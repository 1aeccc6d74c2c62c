"""The families of test_families.py: configurations as released, and what of them `make test` runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import transformers

from megatron_gvpo.verify.layout import ParallelLayout, layouts_for
from megatron_gvpo.verify.shrink import shrink

_SP = {"tp": 2, "sequence_parallel": True}
_SMALL = {"overlap": True, "small": True}

_DEPTH = ("num_hidden_layers", "layer_types", "mlp_layer_types", "moe_layer_freq", "no_rope_layers")
_DEPTH += ("first_k_dense_replace",)
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token")


@dataclass(frozen=True)
class Family:
    """An architecture. `config`: a configuration class of transformers, whose defaults, with `changes`, are a
    released model, or have other values than Megatron-Bridge would assume.
    """

    architecture: str
    config: str
    title: str
    quick: ParallelLayout | None  # the layout of `make test`, if any
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def released(self) -> dict[str, Any]:
        """A released model's config.json."""
        config: transformers.PretrainedConfig = getattr(transformers, self.config)(**self.changes)
        named = {key: self.changes[key] for key in ("model_type",) if key in self.changes}
        return {**config.to_dict(), **named, "architectures": [self.architecture]}

    @property
    def tiny(self) -> dict[str, Any]:
        return shrink(self.released, self.architecture)

    @property
    def shallow(self) -> dict[str, Any]:
        """The released model with few layers and 16 experts, but every kind of layer at its true width."""
        tiny, shallow = self.tiny, {**self.released, "dtype": "bfloat16"}
        shallow |= {key: tiny[key] for key in _DEPTH if key in tiny}
        shallow |= {key: 16 for key in _EXPERTS if shallow.get(key)}
        shallow |= {key: min(shallow[key], 4) for key in _CHOSEN if shallow.get(key)}
        if (shallow.get("n_group") or 1) > 1:
            shallow |= {"n_group": 4, "topk_group": 2}
        return shallow

    @property
    def layouts(self) -> list[ParallelLayout]:
        return layouts_for(self.tiny, cores=4)

    @property
    def small_layouts(self) -> list[ParallelLayout]:
        """Layouts with overlapped communication and the sizes of small_constants.py."""
        return [replace(ParallelLayout(2), **_SMALL), replace(ParallelLayout(4, pp=2), **_SMALL)]


_GLM = {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5, "head_dim": 128}

# EXAONE 4.0 1.2B; its larger models mix two kinds of attention.
_EXAONE4 = {
    "tie_word_embeddings": True,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_KIMI = {
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 32.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}

FAMILIES = [
    Family("DeepseekV3ForCausalLM", "DeepseekV3Config", "Kimi K2", None, _KIMI),
    Family("Exaone4ForCausalLM", "Exaone4Config", "EXAONE 4.0 (1.2B)", None, _EXAONE4),
    Family("ExaoneMoeForCausalLM", "ExaoneMoeConfig", "K-EXAONE", ParallelLayout(1)),
    Family("GemmaForCausalLM", "GemmaConfig", "Gemma", None),
    Family("Gemma3ForCausalLM", "Gemma3TextConfig", "Gemma 3 (text)", ParallelLayout(2, **_SP)),
    Family("Glm4MoeForCausalLM", "Glm4MoeConfig", "GLM-4.5, 4.6", ParallelLayout(2, **_SP, ep=2), _GLM),
    Family("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", "GLM-4.7-Flash", None),
    Family("GptOssForCausalLM", "GptOssConfig", "GPT-OSS", ParallelLayout(2, **_SP, ep=2)),
    Family("HYV3ForCausalLM", "HYV3Config", "Hy3", None, {"first_k_dense_replace": 1}),
    Family(
        "MiniMaxM2ForCausalLM", "MiniMaxM2Config", "MiniMax-M2", ParallelLayout(2, ep=2), {"rotary_dim": 64}
    ),
    Family("OlmoeForCausalLM", "OlmoeConfig", "OLMoE", ParallelLayout(2, ep=2)),
    Family("Qwen3NextForCausalLM", "Qwen3NextConfig", "Qwen3-Next", ParallelLayout(2, **_SP, ep=2)),
    Family("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", "Qwen3.5", ParallelLayout(2, cp=2)),
    Family("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", "Qwen3.5 MoE", ParallelLayout(2, pp=2)),
]


# (engine, title of the family, dtype of the run), for test_family_servers.py.
SERVED = [
    ("vllm", "Kimi K2", "float32"),
    ("sglang", "Gemma 3 (text)", "float32"),
    ("sglang", "GLM-4.5, 4.6", "float32"),
    ("vllm", "GLM-4.5, 4.6", "float32"),
    ("vllm", "Gemma 3 (text)", "float32"),
    ("vllm", "GPT-OSS", "float32"),
    ("vllm", "Qwen3", "float32"),
    ("sglang", "Qwen3", "float32"),
    ("vllm", "Llama 3", "float32"),
    ("sglang", "Llama 3", "float32"),
    ("vllm", "Mistral", "float32"),
    ("sglang", "Mistral", "float32"),
    ("vllm", "OLMoE", "float32"),
    ("sglang", "OLMoE", "float32"),
    ("vllm", "EXAONE 4.0 (1.2B)", "float32"),
    ("vllm", "Gemma", "float32"),
    ("sglang", "Gemma", "float32"),
    ("vllm", "DeepSeek-V2", "float32"),
    ("vllm", "DeepSeek-V3", "float32"),
    ("vllm", "GLM-4.7-Flash", "float32"),
    ("vllm", "Qwen3.5", "bfloat16"),
    ("vllm", "Qwen3.5 MoE", "bfloat16"),
    ("vllm", "Qwen3-Next", "bfloat16"),
]
# The same, in test_engines.py.
SERVED_ELSEWHERE = [
    (engine, title, "float32") for engine in ("sglang", "vllm") for title in ("Qwen2", "Qwen3-MoE")
]
