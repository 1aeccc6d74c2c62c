"""Attention of one new token without copying the cache, as transformers 5.23 has it and 5.19 has not.

With grouped-query attention, 5.19 repeats keys and values to the number of query heads at every step;
on a CPU that copy costs more than the attention. A single query token needs no copy: its heads are
independent rows, so those that share a key/value head can stand in the place of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "grouped_sdpa"  # the name for `attn_implementation`


def grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,  # [batch, query heads, tokens, dim]
    key: Tensor,  # [batch, key heads, cached tokens, dim]
    value: Tensor,
    attention_mask: Tensor | None,  # [batch, 1, tokens, cached tokens]
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Output [batch, tokens, query heads, dim]; for anything but one plain query token, transformers' own."""
    batch, heads, tokens, dim = query.shape
    if tokens > 1 or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )[0]
        return output, None
    rows = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(batch, 1, heads, -1), None


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
