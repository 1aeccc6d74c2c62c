"""`model.adapter`: low-rank adapters (LoRA) that train in place of the model's weights.

A linear layer's weight W becomes W + (alpha / rank) B A, where A has `rank` rows and B has `rank` columns
(arXiv 2106.09685). Only A and B are trained.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from megatron_gvpo.core.section import LocalPath, Section

ALL = "all"
# Each of these groups is one linear layer in Megatron.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# megatron-core's names of the linear layers that Hugging Face has under these names.
MEGATRON_NAMES = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
    "down_proj": "linear_fc2",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
}
FUSED_NAMES = {"linear_qkv": _GROUPS[0], "linear_fc1": _GROUPS[1]}

# Layers that are refused by name, with the reasons.
_REFUSED = {
    "gate": (
        "the router of a mixture of experts: with sequence parallelism its adapter's gradient would be "
        "wrong, and servers do not load one"
    ),
    "router": "the router of a mixture of experts, and no server loads its adapter",
    "embed_tokens": "the embedding: Megatron-Bridge has adapters for linear layers only",
    "lm_head": "the output layer: the fused head computes log-probs from its weight alone",
}
_KNOWN = ", ".join([ALL, *MEGATRON_NAMES])


def _no_dora(kind: Any) -> Any:
    if kind in ("dora", "qdora"):
        raise ValueError(
            f"{kind}: no Hugging Face adapter can hold its magnitudes as Megatron-Bridge computes them, and "
            "SGLang refuses it; use canonical_lora or lora"
        )
    return kind


def _listed(targets: Any) -> Any:
    return (targets,) if isinstance(targets, str) else targets


class AdapterConfig(Section):
    fixed_keys = ("type", "rank", "alpha", "targets")
    free_keys = ("path",)

    # canonical_lora gives each of Hugging Face's linear layers an A of its own, as Hugging Face PEFT does;
    # lora shares one A among q, k and v, and one among gate and up: fewer parameters.
    type: Annotated[Literal["canonical_lora", "lora"], BeforeValidator(_no_dora)] = "canonical_lora"
    rank: int = Field(32, gt=0, le=4096)  # Rows of A and columns of B.
    alpha: int = Field(32, gt=0, le=2**16)  # The adapter's product B A is multiplied by alpha / rank.
    # Hugging Face names of the linear layers that get adapters, as [q_proj, v_proj]; all: every linear layer
    # of attention and MLP whose adapter can be exported.
    targets: Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)] = (ALL,)
    # A directory with adapter_model.safetensors (Hugging Face PEFT) to start from; default: new adapters,
    # with which the model computes as without them.
    path: LocalPath | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for name in self.targets:
            if name in _REFUSED:
                raise ValueError(f"targets: {name} is {_REFUSED[name]}: leave it out")
            if name != ALL and name not in MEGATRON_NAMES:
                raise ValueError(f"targets: there is no {name!r}; known are {_KNOWN}")
        if ALL in self.targets and len(self.targets) > 1:
            raise ValueError(
                f"targets={list(self.targets)}: {ALL} includes the others: give one or the other"
            )
        for group in _GROUPS if self.type == "lora" and ALL not in self.targets else ():
            absent = sorted(set(group) - set(self.targets))
            if 0 < len(absent) < len(group):
                raise ValueError(
                    f"targets={list(self.targets)}: type=lora shares one A among {', '.join(group)}, and "
                    f"{absent[0]} is not there: add it, or use type=canonical_lora"
                )
        return self

    def selected(self, possible: tuple[str, ...]) -> tuple[str, ...]:
        """Return Hugging Face's names of the layers with adapters, sorted; `possible`: those of the model."""
        return tuple(sorted(possible if ALL in self.targets else set(self.targets)))


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OF_MLPS = ("gate_proj", "up_proj", "down_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")

# Architectures whose adapters are compared with transformers and peft (tests/megatron/test_adapters.py), and
# the layers that can have adapters.
TARGETS: dict[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Gemma3ForCausalLM": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    "Glm4MoeForCausalLM": _ATTENTION,
    "GptOssForCausalLM": _ATTENTION,
    "LlamaForCausalLM": _ATTENTION + OF_MLPS,
    "MiniMaxM2ForCausalLM": _ATTENTION,
    "MistralForCausalLM": _ATTENTION + OF_MLPS,
    "OlmoeForCausalLM": _ATTENTION + OF_MLPS,
    "Qwen2ForCausalLM": _ATTENTION + OF_MLPS,
    "Qwen3ForCausalLM": _ATTENTION + OF_MLPS,
    "Qwen3MoeForCausalLM": _ATTENTION + OF_MLPS,
}


def possible_targets(architecture: str) -> tuple[str, ...]:
    """Return Hugging Face's names of the layers that can have adapters; empty if none is proven."""
    return TARGETS.get(architecture, ())
