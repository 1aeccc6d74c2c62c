"""The head's mathematics apart from its tiles: matrix products, statistics of a softmax, a plain reference.

Results of products are always fp32; on CUDA the operands keep the parameters' dtype. So bf16 operands use the
tensor cores. A CPU has no bf16 product with an fp32 result: there the operands are converted first.

Statistics are those of pieces of the vocabulary. They are [s, r] in the accumulator's dtype: the largest
logit; the sum of e^(z - largest); the label's logit (-inf if another piece has the label); and, for the
entropy, the sum of (z - largest) e^(z - largest). A piece is a tile of a shard, or a shard of a
tensor-parallel group. Both are merged by the online softmax (Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of operands of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return dtype if device.type == "cuda" else accumulator(dtype)


def operand(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Convert `x` for a product with operands of `dtype` (default: its own dtype)."""
    return x.to(operand_dtype(x.dtype if dtype is None else dtype, x.device))


def addmm_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """out <- beta out + alpha a @ b, accumulated in out's dtype."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    return torch.addmm(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)


def empty_statistics(labels_r: Tensor, dtype: torch.dtype, entropy: bool) -> Tensor:
    """Return the statistics of an empty piece. Its largest logit is finite, which prevents inf - inf."""
    stats_sr = torch.empty(3 + entropy, len(labels_r), dtype=dtype, device=labels_r.device)
    for row_r, value in zip(stats_sr, (torch.finfo(dtype).min, 0.0, -torch.inf, 0.0), strict=False):
        row_r.fill_(value)  # fill_ runs on the device; a copy from the host would synchronise
    return stats_sr


def merge_statistics(stats_ksr: Tensor) -> Tensor:
    """Merge the statistics of k pieces of the vocabulary: [k, s, r] -> [s, r]."""
    max_kr, sum_kr, target_kr = stats_ksr[:, 0], stats_ksr[:, 1], stats_ksr[:, 2]
    max_r = max_kr.amax(0)
    shift_kr = max_kr - max_r
    scale_kr = shift_kr.exp()
    merged = [max_r, (scale_kr * sum_kr).sum(0), target_kr.amax(0)]
    if stats_ksr.shape[1] == 4:
        merged.append((scale_kr * (stats_ksr[:, 3] + shift_kr * sum_kr)).sum(0))
    return torch.stack(merged)


def logp_of(stats_sr: Tensor) -> Tensor:
    # Not target - logsumexp: near p = 1 that rounds at the size of a logit, not of logp.
    return (stats_sr[2] - stats_sr[0]) - stats_sr[1].log()


def entropy_of(stats_sr: Tensor) -> Tensor:
    """Return the entropy in nats, [r]; needs statistics with all four rows."""
    return stats_sr[1].log() - stats_sr[3] / stats_sr[1]


def label_columns(columns: int, labels_r: Tensor) -> tuple[Tensor, Tensor]:
    """Return every label's column, and a mask of the labels below `columns`; others get some valid column."""
    return labels_r.clamp(0, columns - 1), (labels_r >= 0) & (labels_r < columns)


def reference_logprobs(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    labels_r: Tensor,
    temperature: float | Tensor,
    entropy: bool,
    vocab_size: int,
    hide_: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (logp, entropy or None), both [r], from all logits under autograd.

    A label outside the vocabulary has logp -inf. `hide_` takes logits out of the softmax. Tests and
    benchmarks compare the other backends with it.
    """
    dtype = accumulator(hidden_rh.dtype)
    z_rv = hidden_rh.to(dtype) @ weight_vh[:vocab_size].to(dtype).T
    z_rv = z_rv / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    if hide_ is not None:
        hide_(z_rv)
    logp_rv = torch.log_softmax(z_rv, -1)
    inside_r = (labels_r >= 0) & (labels_r < vocab_size)
    logp_r = logp_rv.gather(1, labels_r.clamp(0, vocab_size - 1)[:, None])[:, 0]
    logp_r = torch.where(inside_r, logp_r, -torch.inf)
    return logp_r, -(logp_rv.exp() * logp_rv).sum(-1) if entropy else None
