"""Refuses models that an engine's build for CPUs cannot serve.

Such a server does not start, or starts and dies of the first prompt. On GPUs the engines run other kernels.
"""

from __future__ import annotations

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import check_family
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.settings.adapter import OF_MLPS, possible_targets
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig

# The sizes of heads for which vLLM 0.32 has a compiled kernel. A server with another size starts, and ends at
# the first prompt. tests/servers/test_head_sizes.py asks the kernels.
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# The sizes for latent attention: kv_lora_rank, qk_rope_head_dim.
CPU_LATENT_SIZES = (512, 64)

# vLLM 0.32 serves these on a CPU in bfloat16 only.
DELTA_NETS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
_LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
# Why an engine does not serve an architecture on a CPU (SGLang 0.5.23).
NOT_ON_CPU: dict[str, dict[str, str]] = {
    "sglang": {
        **dict.fromkeys(
            DELTA_NETS, "its gated delta nets need SGLang's kernel package, which has no CPU build"
        ),
        **dict.fromkeys(
            _LATENT, "SGLang's attention for CPUs (torch_native) takes the latents in its cache for keys"
        ),
        **dict.fromkeys(
            ("Exaone4ForCausalLM", "ExaoneMoeForCausalLM"),
            "SGLang wants an attention kernel of GPUs for it (fa3, triton or trtllm_mha)",
        ),
        "GptOssForCausalLM": "SGLang's attention for CPUs (torch_native) has no attention sinks",
    },
    "vllm": {
        "MiniMaxM2ForCausalLM": "vLLM's kernels for CPUs choose experts by a sigmoid only out of groups",
    },
}


def check_rollout_model(model: ModelConfig, rollout: RolloutConfig, cards: ModelCards) -> None:
    """Raises ConfigError where rollout servers that this machine starts on CPUs could not serve the model."""
    if rollout.engine not in NOT_ON_CPU or rollout.servers.urls:
        return
    where = f"{cards.served_key}={cards.served_path}"
    check_family(cards.served, where)
    check_on_cpu(cards.served, rollout.engine, model.dtype, "rollout.engine", where)
    if rollout.weights.traits.sends_adapter and cards.served.experts:
        _check_adapters(model, rollout, cards.served)


def _check_adapters(model: ModelConfig, rollout: RolloutConfig, card: ModelCard) -> None:
    """Raises ConfigError for adapters beside experts, which the engines compute by Triton kernels.

    vLLM (0.32.0) does so wherever it takes adapters, SGLang (0.5.23) where experts have some.
    """
    engine, adapter = rollout.engine, model.adapter
    assert adapter is not None, "checked with the configuration"
    possible = possible_targets(card.architectures[0])
    of_experts = sorted(set(adapter.selected(possible)) & set(OF_MLPS))
    if engine == "vllm" or of_experts:
        named = f"adapters of experts ({', '.join(of_experts)})" if of_experts else "adapters beside experts"
        raise ConfigError(
            f"rollout.weights.transport={rollout.weights.transport} with rollout.engine={engine} on a "
            f"machine without a GPU: {engine} computes {named} with Triton, which has no build for CPUs: use "
            "rollout.weights.transport=broadcast, which sends merged weights"
        )


def check_on_cpu(model: ModelCard, engine: str, dtype: str, key: str, where: str) -> None:
    """Raises ConfigError where an engine could not serve a model on CPUs.

    `model`: its card. `key`, `where`: the key that names the engine, and the key that names the model,
    with its value.
    """
    refusal = f"{key}={engine} on a machine without a GPU: {where} "
    architecture = next(iter(model.architectures), "")
    if (why := NOT_ON_CPU[engine].get(architecture)) is not None:
        others = [other for other in NOT_ON_CPU if architecture not in NOT_ON_CPU[other]]
        raise ConfigError(f"{refusal}is {architecture}: {why}: use {key}={others[0]}, or a GPU")
    if engine != "vllm":
        return
    if architecture in DELTA_NETS and dtype != "bfloat16":
        raise ConfigError(
            f"{refusal}is {architecture}, whose gated delta nets vLLM's CPU kernels serve in bfloat16 only: "
            f"use model.dtype=bfloat16 in place of {dtype}"
        )
    if model.is_mla:
        sizes = (model["kv_lora_rank"], model.get("qk_rope_head_dim"))
        if sizes != CPU_LATENT_SIZES:
            raise ConfigError(
                f"{refusal}has latent attention with (kv_lora_rank, qk_rope_head_dim)={sizes}, and vLLM's "
                f"kernel for CPUs has {CPU_LATENT_SIZES} only: use such a model, or a GPU"
            )
        return
    size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    for found_size in (size, model.get("global_head_dim") or size):
        if found_size not in CPU_HEAD_SIZES:
            raise ConfigError(
                f"{refusal}has attention heads of {found_size} elements, and vLLM's kernels for CPUs have "
                f"{', '.join(map(str, CPU_HEAD_SIZES))}: use such a model, or another engine"
            )
