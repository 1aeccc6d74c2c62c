"""Supports for tests, and log-probs over them in fp64 from masked logits."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gvpo.kernels.supports import Supports


def made_supports(labels_r: Tensor, vocab_size: int, sizes: list[int]) -> Supports:
    """Supports of these sizes in turn, each with its label; size 0: the whole vocabulary."""
    generator = torch.Generator().manual_seed(len(labels_r))
    members: list[int] = []
    counts: list[int] = []
    for i, label in enumerate(labels_r.tolist()):
        size = sizes[i % len(sizes)]
        others = [j for j in torch.randperm(vocab_size, generator=generator).tolist() if j != label]
        chosen = sorted([label, *others[: size - 1]]) if size else []
        members += chosen
        counts.append(len(chosen))
    return Supports(torch.tensor(members, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64))


def masked(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    labels_r: Tensor,
    supports: Supports,
    g_r: Tensor,
    e_r: Tensor,
    temperature: float | Tensor,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, entropy, dX and dW of sum(g * logp + e * entropy), one token at a time, all in fp64."""
    x, w = (t.detach().double().requires_grad_() for t in (hidden_rh, weight_vh))
    temperature_r = torch.as_tensor(temperature, dtype=torch.float64).expand(len(labels_r))
    logps, entropies = [x.new_zeros(0)], [x.new_zeros(0)]
    for i, (begin, count) in enumerate(zip(supports.offsets, supports.count_r.tolist(), strict=False)):
        members = supports.ids_k[begin : begin + count] if count else torch.arange(len(w))[:vocab_size]
        logp_k = torch.log_softmax(w[members] @ x[i] / temperature_r[i], 0)
        logps.append(logp_k[members == labels_r[i]])
        entropies.append(-(logp_k.exp() * logp_k).sum()[None])
    logp_r, entropy_r = torch.cat(logps), torch.cat(entropies)
    loss = (g_r * logp_r).sum() + (e_r * entropy_r).sum() + 0 * (x.sum() + w.sum())
    return logp_r.detach(), entropy_r.detach(), *torch.autograd.grad(loss, (x, w))
