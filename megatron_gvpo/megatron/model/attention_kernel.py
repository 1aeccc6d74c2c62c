"""Decides which attention kernel Transformer Engine would run on a GPU, and refuses layouts that have none.

The rules are those of Transformer Engine's `get_attention_backend` for packs (its format "thd") with a causal
mask, and of the cuDNN that torch brings. tests/megatron/test_attention_kernel.py asks Transformer Engine's
own function the same questions. docs/reference/layouts.md has the answers as a table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.versions import REFERENCE
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig

Kernel = Literal["cuDNN", "FlashAttention", "unfused", "none"]
Capability = tuple[int, int]  # a GPU's compute capability: (8, 0) A100, (9, 0) H100, (10, 0) B200


@dataclass(frozen=True)
class Attention:
    """The properties of an attention layer that the choice of its kernel depends on."""

    dtype: str  # dtype of queries, keys and values; FP8 runs have bfloat16 here
    deterministic: bool
    cp: int  # context-parallel ranks
    head_dim_qk: int
    head_dim_v: int
    sinks: bool = False  # a learned score of every head is in the softmax's denominator (GPT-OSS)

    @staticmethod
    def of(
        model: ModelConfig, parallel: ParallelConfig, deterministic: bool, shape: dict[str, Any]
    ) -> Attention:
        """Return the attention of a model; `shape`: its config.json."""
        if shape.get("kv_lora_rank"):
            qk, v = shape["qk_nope_head_dim"] + shape["qk_rope_head_dim"], shape["v_head_dim"]
        else:
            qk = v = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        has_sinks = "GptOssForCausalLM" in (shape.get("architectures") or [])
        return Attention(model.dtype, deterministic, parallel.cp, qk, v, has_sinks)


def kernel(attention: Attention, capability: Capability, flash_attention: bool) -> Kernel:
    """Return the kernel of a training pass over long packs; `flash_attention`: flash-attn is installed.

    "unfused" computes all scores of a pack's sequences, padded to the longest, in memory. "none": Transformer
    Engine raises an error. If cuDNN serves only short packs, the answer is the one for long packs.
    """
    if _cudnn(attention, capability):
        return "cuDNN"
    widest = max(attention.head_dim_qk, attention.head_dim_v)
    is_plain = attention.dtype == "bfloat16" and not attention.sinks
    if flash_attention and is_plain and widest <= 256 and widest % 8 == 0:
        return "FlashAttention"
    return "unfused" if attention.cp == 1 else "none"


def _cudnn(attention: Attention, capability: Capability) -> bool:
    qk, v = attention.head_dim_qk, attention.head_dim_v
    if attention.dtype != "bfloat16" or capability < (9, 0) or qk % 8 or v % 8:
        return False
    if attention.sinks and attention.deterministic:
        return False
    if capability < (10, 0):
        # In deterministic mode, Transformer Engine turns this kernel off for packs of 2^30 scores or more.
        fits = max(qk, v) <= 256 and (qk == v or min(qk, v) < 128 or _mla(qk, v))
        return fits and not attention.deterministic
    return max(qk, v) <= 128 or _mla(qk, v)


def _mla(qk: int, v: int) -> bool:
    return (qk, v) == (192, 128)  # DeepSeek's latent attention


def check_attention(attention: Attention, capability: Capability, flash_attention: bool) -> None:
    """Raise ConfigError if packs would have no attention kernel, or one whose memory is quadratic.

    float32 on one context-parallel rank has only a kernel with quadratic memory. It is allowed, for small
    checks.
    """
    chosen = kernel(attention, capability, flash_attention)
    if chosen not in ("unfused", "none") or (chosen == "unfused" and attention.dtype == "float32"):
        return
    named = f"compute capability {capability[0]}.{capability[1]}"
    causes = [f"model.dtype={attention.dtype}"] if attention.dtype == "float32" else []
    causes += [f"parallel.cp={attention.cp}"] if attention.cp > 1 else []
    if attention.sinks:
        causes.append("the model's attention sinks")
    if attention.deterministic and ((9, 0) <= capability < (10, 0) or attention.sinks):
        causes.append("train.deterministic=true")
    if attention.head_dim_qk > 128 or attention.head_dim_qk % 8 or attention.head_dim_v % 8:
        causes += [f"head dimensions {attention.head_dim_qk} and {attention.head_dim_v}"]
    if attention.dtype == "float32":
        remedy = "use model.dtype=bfloat16, or parallel.cp=1"
    elif kernel(attention, capability, flash_attention=True) == "FlashAttention":
        install = f"pip install --no-build-isolation flash-attn=={REFERENCE['flash-attn']}"
        remedy = f"install flash-attn, which the trainer's image has ({install})"
    elif kernel(replace(attention, deterministic=False), capability, flash_attention) == "cuDNN":
        remedy = "set train.deterministic=false"
    else:
        remedy = "no release of flash-attn has one either: use another model"
    without = "has no attention kernel for packs" if chosen == "none" else "would keep all scores of a pack"
    settings = ", ".join(causes) or "model.dtype=bfloat16"
    raise ConfigError(f"{settings} on a GPU of {named}: Transformer Engine {without} here; {remedy}")


def check_shared_prompts(attention: Attention, capability: Capability) -> None:
    """Raise ConfigError if the kernels of `megatron/attention/core.py` cannot compute shared prompts."""
    qk, v = attention.head_dim_qk, attention.head_dim_v
    if attention.dtype != "bfloat16":
        reason = f"it takes bfloat16, and this is model.dtype={attention.dtype}"
    elif capability < (8, 0):
        reason = f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    elif qk != v or qk % 8 or qk > 256:
        reason = f"it takes head dimensions that are multiples of 8 up to 256, and the model's is {qk}"
    else:
        return
    raise ConfigError(
        f"train.share_prompts=true needs FlashAttention on a GPU, and {reason}; set it to false"
    )


def has_flash_attention() -> bool:
    """Return True if this environment has flash-attn."""
    try:
        version("flash-attn")
    except PackageNotFoundError:
        return False
    return True
