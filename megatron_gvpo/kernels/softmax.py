"""Softmax statistics of pieces of the vocabulary, and the merge of pieces.

Statistics are [s, r] in the accumulator's dtype: the largest logit; the sum of e^(z - largest); the label's
logit (-inf if another piece has the label); and, for the entropy, the sum of (z - largest) e^(z - largest).
A piece is a tile of a shard, or a shard of a tensor-parallel group. Both are merged by the online softmax
(Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import torch
from torch import Tensor


def no_columns(labels_r: Tensor, dtype: torch.dtype, entropy: bool) -> Tensor:
    """Return the statistics of an empty piece. Its largest logit is finite, which prevents inf - inf."""
    stats_sr = torch.empty(3 + entropy, len(labels_r), dtype=dtype, device=labels_r.device)
    for row_r, value in zip(stats_sr, (torch.finfo(dtype).min, 0.0, -torch.inf, 0.0), strict=False):
        row_r.fill_(value)  # the device fills by itself; a copy from the host would synchronise
    return stats_sr


def merge(stats_ksr: Tensor) -> Tensor:
    """Merge the statistics of k pieces of the vocabulary: [k, s, r] -> [s, r]."""
    max_kr, sum_kr, target_kr = stats_ksr[:, 0], stats_ksr[:, 1], stats_ksr[:, 2]
    max_r = max_kr.amax(0)
    shift_kr = max_kr - max_r
    scale_kr = shift_kr.exp()
    merged = [max_r, (scale_kr * sum_kr).sum(0), target_kr.amax(0)]
    if stats_ksr.shape[1] == 4:
        merged.append((scale_kr * (stats_ksr[:, 3] + shift_kr * sum_kr)).sum(0))
    return torch.stack(merged)


def logp(stats_sr: Tensor) -> Tensor:
    # Not target - logsumexp: near p = 1 that rounds at the size of a logit, not of logp.
    return (stats_sr[2] - stats_sr[0]) - stats_sr[1].log()


def entropy(stats_sr: Tensor) -> Tensor:
    """Return the entropy in nats, [r]; needs statistics with all four rows."""
    return stats_sr[1].log() - stats_sr[3] / stats_sr[1]


def locate(columns: int, labels_r: Tensor) -> tuple[Tensor, Tensor]:
    """Return every label's column, and a mask of the labels below `columns`; others get some valid column."""
    return labels_r.clamp(0, columns - 1), (labels_r >= 0) & (labels_r < columns)
