"""PyTorch's FlashAttention operators for packed sequences, which only GPUs have, computed on CPU tensors.

The functions raise ValueError for arguments that the kernels refuse, and also for arguments that the kernels
accept and then compute wrong results from: statistics that are not contiguous, sequence ends that do not fit
the tensors, a wrong longest length, an empty sequence. The rules come from `mha_varlen_fwd` and
`mha_varlen_bwd` in FlashAttention's C++ interface (2.8.3), of which PyTorch contains a copy. Every floating
dtype is accepted, so that tests can compare in fp64.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    _plain(dropout, debug, others)
    slices = spans(query, key, value, ends_q, ends_k, max_q, max_k)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[1], len(query), dtype=torch.promote_types(query.dtype, torch.float32))
    for rows, columns in slices:
        scores = scores_of(query[rows], key[columns], causal, scale)
        lse[:, rows] = scores.logsumexp(-1).to(lse.dtype)
        weights = scores.softmax(-1)
        out[rows] = torch.einsum("nqk,knd->qnd", weights, wide(value[columns], query)).to(out.dtype)
    seed = torch.zeros(2, dtype=torch.uint64)
    return out, lse, seed, torch.empty((), dtype=torch.uint64), torch.empty(0, dtype=query.dtype)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    _plain(dropout, False, others)
    _require(
        grad.dtype == out.dtype == query.dtype and grad.shape == out.shape == query.shape,
        "gradient, output and queries of one dtype and shape",
    )
    _require(
        lse.is_contiguous() and lse.shape == (query.shape[1], len(query)),
        "contiguous statistics [heads, tokens]: they are read without strides",
    )
    _require(lse.dtype == torch.promote_types(query.dtype, torch.float32), "statistics in float32")
    slices = spans(query, key, value, ends_q, ends_k, max_q, max_k)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for rows, columns in slices:
        q, k, v = wide(query[rows], query), wide(key[columns], query), wide(value[columns], query)
        g, o = wide(grad[rows], query), wide(out[rows], query)
        p = (scores_of(query[rows], key[columns], causal, scale) - lse[:, rows, None]).exp()
        ds = p * (torch.einsum("qnd,knd->nqk", g, v) - (g * o).sum(-1).t()[..., None]) * factor
        dq[rows] = torch.einsum("nqk,knd->qnd", ds, k).to(dq.dtype)
        for total, one in ((dk, (ds, q)), (dv, (p, g))):
            full = torch.einsum("nqk,qnd->knd", *one)
            total[columns] = full.unflatten(1, (key.shape[1], -1)).sum(2).to(dk.dtype)
    return dq, dk, dv


def _require(is_met: bool, rule: str) -> None:
    if not is_met:
        raise ValueError(f"FlashAttention takes {rule}")


def _plain(dropout: float, debug: bool, others: dict[str, Any]) -> None:
    is_plain = dropout == 0 and not debug and all(value is None for value in others.values())
    _require(is_plain, f"dropout, windows, slopes and paging elsewhere, and here none of them: {others}")


def spans(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int
) -> list[tuple[slice, slice]]:
    """The slices (queries, keys) of every sequence in the packed tensors."""
    _require(
        query.dtype == key.dtype == value.dtype and key.shape == value.shape,
        "queries, keys and values of one dtype, and keys and values of one shape",
    )
    _require(
        query.shape[1] % key.shape[1] == 0 and query.shape[2] == key.shape[2],
        "as many heads of queries as of keys, or a multiple, all of one width",
    )
    _require(query.shape[2] % 8 == 0 and query.shape[2] <= 256, "widths that 8 divides, up to 256")
    _require(all(x.stride(-1) == 1 for x in (query, key, value)), "heads without gaps")
    slices = []
    for x, ends, longest in ((query, ends_q, max_q), (key, ends_k, max_k)):
        _require(
            ends.dtype == torch.int32 and ends.is_contiguous() and ends.device == x.device,
            "ends as contiguous int32 on the tensors' device",
        )
        lengths = ends.diff().tolist()
        _require(
            int(ends[0]) == 0 and int(ends[-1]) == len(x) and min(lengths) > 0 and max(lengths) == longest,
            f"ends from 0 to the last token, without an empty span, and with {longest} as the longest",
        )
        slices.append([slice(a, b) for a, b in pairwise(ends.tolist())])
    return list(zip(*slices, strict=True))


def scores_of(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    """The scores [n, queries, keys]. A causal mask is aligned with the last query and the last key."""
    scores = torch.einsum("qnd,knd->nqk", wide(q, q), wide(k, q))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def wide(x_tnd: Tensor, query: Tensor) -> Tensor:
    """Repeat a tensor's heads until it has as many as the query, in the dtype of the scores."""
    precise = torch.promote_types(query.dtype, torch.float32)
    return x_tnd.repeat_interleave(query.shape[1] // x_tnd.shape[1], dim=1).to(precise)
