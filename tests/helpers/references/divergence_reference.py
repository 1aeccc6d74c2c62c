"""Divergences by torch.nn.functional on all logits, under plain autograd."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from megatron_gvpo.kernels.divergence import Divergence


def on_logits(kind: Divergence, z: Tensor, y: Tensor) -> Tensor:
    """The divergence of softmax(z) from softmax(y), [r]."""
    p, t = z.log_softmax(1), y.log_softmax(1)
    if kind.top_k is not None:  # the k likeliest tokens of the teacher, and all others as one
        index = t.topk(min(kind.top_k, t.shape[1])).indices
        others = torch.ones_like(t, dtype=torch.bool).scatter(1, index, False)
        if others.any():
            rest = [x.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True) for x in (p, t)]
            p, t = (torch.cat((x.gather(1, index), r), 1) for x, r in zip((p, t), rest, strict=True))
    kl = partial(kl_div, reduction="none", log_target=True)  # kl_div(b, a) = KL(a || b)
    if kind.kind == "forward":
        return kl(p, t).sum(1)
    if kind.kind == "reverse":
        return kl(t, p).sum(1)
    m = (kind.beta * t.exp() + (1 - kind.beta) * p.exp()).log()
    return (kind.beta * kl(m, t) + (1 - kind.beta) * kl(m, p)).sum(1)
