"""Architectures that Megatron-Bridge (0.6.2) builds and training refuses, each with what was wrong.

The numbers are those of `megatron-gvpo verify` in one process, on a tiny model with the defaults of
transformers (5.19), with this package's CPU stand-ins for Transformer Engine's layers.
"""

from __future__ import annotations

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
