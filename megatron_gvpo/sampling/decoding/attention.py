"""Attention of one new token without copying the cache, as transformers 5.23 has it and 5.19 has not.

With grouped-query attention, 5.19 repeats keys and values to the number of query heads at every step;
on a CPU that copy costs more than the attention. A single query token needs no copy: its heads are
independent rows, so those that share a key/value head can stand in place of the sequence.
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
    output = _attend(rows, key, value, attention_mask, scaling)
    return output.reshape(batch, 1, heads, -1), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """As scaled_dot_product_attention; in fp32 on a CPU by two products over all rows and heads at once.

    PyTorch's CPU kernel multiplies for each row and head on its own, and takes twice the time. The products
    read the room behind the columns, too: of keys with gaps between the heads they would make a copy.
    """
    columns = key.shape[2]
    plain = mask is None or mask.dtype == torch.bool
    if not (query.is_cpu and query.dtype == torch.float32 and plain):
        output: Tensor = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling
        )
        return output
    batch, heads, rows, dim = query.shape
    scores = torch.bmm(query.flatten(0, 1) * (scaling or dim**-0.5), _with_room(key).flatten(0, 1).mT)
    scores = scores.view(batch, heads, rows, -1)
    scores[..., columns:] = -torch.inf
    if mask is not None:
        scores[..., :columns].masked_fill_(~mask, -torch.inf)
    shares = scores.softmax(-1).flatten(0, 1)
    return torch.bmm(shares, _with_room(value).flatten(0, 1)).view(batch, heads, rows, -1)


def _with_room(held: Tensor) -> Tensor:
    """`held` [rows, heads, columns, dim] with the columns of its memory behind these: see `kv_cache.py`."""
    rows, heads, columns, dim = held.shape
    room = held.stride(1) // dim
    contiguous = (heads * room * dim, room * dim, dim, 1)
    if room <= columns or held.storage_offset() or held.stride() != contiguous:
        return held
    return held.as_strided((rows, heads, room, dim), contiguous)


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
