"""The adapters of test_adapters.py: the family, the kind and the adapted matrices of each."""

from __future__ import annotations

from helpers.references.adapter_reference import Shared

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
# name: (model, type, targets)
ADAPTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "untied-all": ("untied", "canonical_lora", ATTENTION + MLP),
    "untied-fused": ("untied", "lora", ATTENTION + MLP),
    "untied-qv": ("untied", "canonical_lora", ("q_proj", "v_proj", "up_proj")),
    "untied-mlp": ("untied", "canonical_lora", MLP),
    "tied-all": ("tied", "canonical_lora", ATTENTION + MLP),
    "qwen3-all": ("qwen3", "canonical_lora", ATTENTION + MLP),
    "llama3-all": ("llama3", "canonical_lora", ATTENTION + MLP),
    "mistral-all": ("mistral", "canonical_lora", ATTENTION + MLP),
    "qwen3_moe-all": ("qwen3_moe", "canonical_lora", ATTENTION + MLP),
    "qwen3_moe-fused": ("qwen3_moe", "lora", ATTENTION + MLP),
    # An expert's gate and up share one A, as on GPUs.
    "qwen3_moe-grouped": ("qwen3_moe", "canonical_lora", ATTENTION + MLP),
    "qwen3_moe-up": ("qwen3_moe", "canonical_lora", (*ATTENTION, "up_proj")),
    "qwen3_moe-attention": ("qwen3_moe", "canonical_lora", ATTENTION),
    "deepseek_v2-all": ("deepseek_v2", "canonical_lora", LATENT),
    "deepseek_v3-all": ("deepseek_v3", "canonical_lora", LATENT),
    "gemma3-all": (
        "Gemma3ForCausalLM",
        "canonical_lora",
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    ),
    "olmoe-all": ("OlmoeForCausalLM", "canonical_lora", ATTENTION + MLP),
    "glm4_moe-all": ("Glm4MoeForCausalLM", "canonical_lora", ATTENTION),
    "gpt_oss-all": ("GptOssForCausalLM", "canonical_lora", ATTENTION),
    "minimax_m2-all": ("MiniMaxM2ForCausalLM", "canonical_lora", ATTENTION),
}


def shared_in(adapter: str) -> Shared:
    """Return the layers of an adapter that share one matrix A."""
    if adapter.endswith("-grouped"):
        return "experts"
    return "everywhere" if ADAPTERS[adapter][1] == "lora" else "nowhere"
