"""Softmax statistics of pieces of the vocabulary, and how pieces become the whole.

Statistics are [s, r] in the accumulator's dtype: the largest logit; the sum of e^(z - largest); the label's
logit (-inf where another piece has it); and, for the entropy, the sum of (z - largest) e^(z - largest).
Tiles of a shard and shards of a tensor-parallel group are the same thing: pieces, merged by the online
softmax (Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import torch
from torch import Tensor


def no_columns(labels_r: Tensor, dtype: torch.dtype, entropy: bool) -> Tensor:
    """Statistics of no columns at all. The largest logit is finite, so that no inf - inf comes of it."""
    stats_sr = torch.empty(3 + entropy, len(labels_r), dtype=dtype, device=labels_r.device)
    for row_r, value in zip(stats_sr, (torch.finfo(dtype).min, 0.0, -torch.inf, 0.0), strict=False):
        row_r.fill_(value)  # by the device itself: a copy from the host would wait for it
    return stats_sr


def merge(stats_ksr: Tensor) -> Tensor:
    """Statistics of k pieces of the vocabulary -> statistics of the whole."""
    max_kr, sum_kr, target_kr = stats_ksr[:, 0], stats_ksr[:, 1], stats_ksr[:, 2]
    max_r = max_kr.amax(0)
    shift_kr = max_kr - max_r
    scale_kr = shift_kr.exp()
    merged = [max_r, (scale_kr * sum_kr).sum(0), target_kr.amax(0)]
    if stats_ksr.shape[1] == 4:
        merged.append((scale_kr * (stats_ksr[:, 3] + shift_kr * sum_kr)).sum(0))
    return torch.stack(merged)


def logp(stats_sr: Tensor) -> Tensor:
    # Not target - logsumexp: near p = 1 that would round at the size of a logit, not of logp.
    return (stats_sr[2] - stats_sr[0]) - stats_sr[1].log()


def entropy(stats_sr: Tensor) -> Tensor:
    """In nats, [r], of statistics that have what it takes."""
    return stats_sr[1].log() - stats_sr[3] / stats_sr[1]


def locate(columns: int, labels_r: Tensor) -> tuple[Tensor, Tensor]:
    """Column of every label, and whether it is one of `columns`; a foreign label gets some valid column."""
    return labels_r.clamp(0, columns - 1), (labels_r >= 0) & (labels_r < columns)
