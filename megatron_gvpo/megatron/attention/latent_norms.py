"""Corrects the norms inside latent attention (DeepSeek's MLA)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

# transformers (5.19) gives these norms its default in DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash, whatever
# rms_norm_eps of config.json is.
_EPSILON = 1e-6
# With Transformer Engine the norm is part of the linear layer behind it.
_PLACES = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")


def correct_latent_norms(chunks: Iterable[Any]) -> None:
    """Give these norms the epsilon of transformers; megatron-core (0.19.2) gives them rms_norm_eps."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MultiLatentAttention):
                for part in (getattr(module, place, None) for place in _PLACES):
                    if part is not None and hasattr(part, "eps"):
                        part.eps = _EPSILON
