"""The one list of families: every supported architecture, with the checks that run it or the reason for none.

All checks of families read this list; test_family_checks.py fails for an architecture that is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import transformers

from megatron_gvpo.servers.cpu_engines import DELTA_NETS, NOT_ON_CPU
from megatron_gvpo.verify.layout import ParallelLayout, layouts_for
from megatron_gvpo.verify.shrink import shrink

# Each check of a family, and the test that makes it. The checks are gradients and exports on a CPU, the GPU's
# code without values and with values, and the weights in a real server of each engine.
CHECKS = {
    "gradients": "tests/megatron/test_families.py",
    "rehearsal": "tests/rehearsal/test_rehearsed_families.py",
    "emulation": "tests/emulation/test_emulated_families.py",
    "sglang": "tests/servers/test_family_servers.py",
    "vllm": "tests/servers/test_family_servers.py",
}

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

    Every check of CHECKS runs it, except those in `elsewhere`, where another test does the same or more, and
    those in `without`, which gives the reason.
    """

    architecture: str
    config: str
    title: str
    quick: ParallelLayout | None  # the layout of `make test`, if any
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    elsewhere: Mapping[str, str] = field(default_factory=dict, hash=False)
    without: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def exclusions(self) -> dict[str, str]:
        """The checks that are not made with this family, with the reasons; engines have their own reasons."""
        by_engine = {name: why.get(self.architecture) for name, why in NOT_ON_CPU.items()}
        return dict(self.without) | {name: why for name, why in by_engine.items() if why}

    def is_checked(self, check: str) -> bool:
        """True if the test that CHECKS names runs it."""
        return check not in self.exclusions and check not in self.elsewhere

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


_QWEN2 = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_LLAMA = {
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN3 = {
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_DEEPSEEK_V2 = {
    "vocab_size": 102400,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 16.0,
    "max_position_embeddings": 163840,
    "rope_parameters": _DEEPSEEK_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
_DEEPSEEK_V3 = {
    "rope_parameters": _DEEPSEEK_ROPE,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 0,
}
_MORE_LAYOUTS = {"gradients": "tests/megatron/test_gradient_invariance.py"}
_REHEARSED = {"rehearsal": "tests/rehearsal/test_configurations.py"}
_EMULATED = {"emulation": "tests/emulation/test_emulated_gradients.py"}
_IN_ENGINES = dict.fromkeys(("sglang", "vllm"), "tests/servers/test_engines.py")
_OLDEST = _MORE_LAYOUTS | _EMULATED | _IN_ENGINES
_IMAGES = {
    **_REHEARSED,
    "gradients": "tests/megatron/test_vision_models.py",
    "emulation": "tests/emulation/test_emulated_vision.py",
    **dict.fromkeys(("sglang", "vllm"), "tests/servers/test_image_servers.py"),
}
_SERVED_NOWHERE = dict.fromkeys(("sglang", "vllm"), "no test has started a server with it")

EVERY_FAMILY = [
    Family("DeepseekV3ForCausalLM", "DeepseekV3Config", "Kimi K2", None, _KIMI),
    Family("Exaone4ForCausalLM", "Exaone4Config", "EXAONE 4.0 (1.2B)", None, _EXAONE4),
    Family(
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        "K-EXAONE",
        ParallelLayout(1),
        without=_SERVED_NOWHERE,
    ),
    Family("GemmaForCausalLM", "GemmaConfig", "Gemma", None),
    Family("Gemma3ForCausalLM", "Gemma3TextConfig", "Gemma 3 (text)", ParallelLayout(2, **_SP)),
    Family("Glm4MoeForCausalLM", "Glm4MoeConfig", "GLM-4.5, 4.6", ParallelLayout(2, **_SP, ep=2), _GLM),
    Family("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", "GLM-4.7-Flash", None),
    Family("GptOssForCausalLM", "GptOssConfig", "GPT-OSS", ParallelLayout(2, **_SP, ep=2)),
    Family("HYV3ForCausalLM", "HYV3Config", "Hy3", None, {"first_k_dense_replace": 1}, {}, _SERVED_NOWHERE),
    Family(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        "MiniMax-M2",
        ParallelLayout(2, ep=2),
        {"rotary_dim": 64},
        {},
        _SERVED_NOWHERE,
    ),
    Family("OlmoeForCausalLM", "OlmoeConfig", "OLMoE", ParallelLayout(2, ep=2)),
    Family("Qwen3NextForCausalLM", "Qwen3NextConfig", "Qwen3-Next", ParallelLayout(2, **_SP, ep=2)),
    Family("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", "Qwen3.5", ParallelLayout(2, cp=2)),
    Family("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", "Qwen3.5 MoE", ParallelLayout(2, pp=2)),
    Family("Qwen2ForCausalLM", "Qwen2Config", "Qwen2", None, _QWEN2, _OLDEST),
    Family("Qwen3ForCausalLM", "Qwen3Config", "Qwen3", None, _QWEN3, _MORE_LAYOUTS),
    Family("LlamaForCausalLM", "LlamaConfig", "Llama 3", None, _LLAMA, _MORE_LAYOUTS),
    Family("MistralForCausalLM", "MistralConfig", "Mistral", None, {"sliding_window": None}, _MORE_LAYOUTS),
    Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", "Qwen3-MoE", None, {"norm_topk_prob": True}, _OLDEST),
    Family("DeepseekV2ForCausalLM", "DeepseekV2Config", "DeepSeek-V2", None, _DEEPSEEK_V2, _MORE_LAYOUTS),
    Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        "DeepSeek-V3",
        None,
        _DEEPSEEK_V3,
        _MORE_LAYOUTS | _EMULATED,
    ),
    Family("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", "Qwen2.5-VL", None, elsewhere=_IMAGES),
    Family("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", "Qwen3-VL", None, elsewhere=_IMAGES),
]


def checked(check: str) -> list[Family]:
    """The families that the test of a check runs."""
    assert check in CHECKS
    return [family for family in EVERY_FAMILY if family.is_checked(check)]


FAMILIES = checked("gradients")


def _served(family: Family, engine: str) -> tuple[str, str, str]:
    is_bf16 = engine == "vllm" and family.architecture in DELTA_NETS  # on a CPU, vLLM runs them only so
    return engine, family.title, "bfloat16" if is_bf16 else "float32"


# (engine, title of the family, dtype of the run): the runs of test_family_servers.py, and of other tests.
SERVED = [_served(family, engine) for engine in NOT_ON_CPU for family in checked(engine)]
SERVED_ELSEWHERE = [
    _served(family, engine)
    for engine in NOT_ON_CPU
    for family in EVERY_FAMILY
    if family.elsewhere.get(engine) == _IN_ENGINES[engine]
]
