"""The head in its plainest form, all logits under autograd: the tests' and benchmarks' reference."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gvpo.kernels.products import accumulator


def reference(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    labels_r: Tensor,
    temperature: float | Tensor,
    entropy: bool,
    vocab_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Return (logp, entropy or None), both [r]; a label outside the vocabulary has logp -inf."""
    dtype = accumulator(hidden_rh.dtype)
    z_rv = hidden_rh.to(dtype) @ weight_vh[:vocab_size].to(dtype).T
    z_rv = z_rv / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logp_rv = torch.log_softmax(z_rv, -1)
    inside_r = (labels_r >= 0) & (labels_r < vocab_size)
    logp_r = logp_rv.gather(1, labels_r.clamp(0, vocab_size - 1)[:, None])[:, 0]
    logp_r = torch.where(inside_r, logp_r, -torch.inf)
    return logp_r, -(logp_rv.exp() * logp_rv).sum(-1) if entropy else None
