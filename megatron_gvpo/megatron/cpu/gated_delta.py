"""Gated delta net over a pack on CPU, in place of the kernels of flash-linear-attention.

megatron-core's layer (`ssm/gated_delta_net`) calls three functions of that library, which need a GPU.
`install()` gives it these instead. The recurrence itself is megatron-core's own in PyTorch, over sequences
that are padded to the longest: a padded token has a write strength of 0 and no decay, so that it changes
nothing. Gated delta rule: Yang et al., arXiv 2412.06464.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import common, gdn
from torch import Tensor

_CHUNK = 64  # tokens that are computed at once; fewer if all sequences are shorter


def install() -> None:
    """Let megatron-core's gated delta net run without flash-linear-attention."""
    common.HAVE_FLA = True  # the layer checks it, and then calls the functions below
    common.l2norm = l2norm
    gdn.causal_conv1d = causal_conv1d
    gdn.chunk_gated_delta_rule = gated_delta_rule


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum of squares + eps)."""
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)


def causal_conv1d(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str, **_: Any
) -> tuple[Tensor, None]:
    """Convolve the channels of x [1, t, d] with the rows of weight [d, width] in each sequence; SiLU."""
    position_t = _positions(cu_seqlens, x.shape[1])
    out = x * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        inside = (position_t >= back).to(x.dtype)[None, :, None]
        out = out + earlier * inside * weight[:, -1 - back]
    if bias is not None:
        out = out + bias
    return F.silu(out), None


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """q, k [1, t, n, dk], v [1, t, n, dv], g and beta [1, t, n] -> [1, t, n, dv], each sequence by itself."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max())
    sequence_t = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    index_t = sequence_t * longest + _positions(cu_seqlens, q.shape[1])

    def padded(x: Tensor) -> Tensor:
        empty = x.new_zeros(len(lengths) * longest, *x.shape[2:])
        return empty.index_copy(0, index_t, x[0]).unflatten(0, (len(lengths), longest))

    chunk = min(_CHUNK, longest)
    out, _ = common.torch_chunk_gated_delta_rule(
        padded(q), padded(k), padded(v), g=padded(g), beta=padded(beta), chunk_size=chunk
    )
    return out.flatten(0, 1).index_select(0, index_t)[None], None


def _positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return each token's position in its sequence, int64 [t]."""
    lengths = cu_seqlens.diff()
    return torch.arange(tokens) - torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
