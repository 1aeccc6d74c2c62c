"""Causal attention over a pack in which responses share the keys and values of their prompt.

A response's queries attend to the whole prompt, and causally to their own tokens. The two parts are computed
separately and merged by their softmax statistics (Milakov and Gimelshein, 2018; as flash attention merges
tiles, arXiv 2205.14135). With the merged output and statistics, the kernel's backward returns each part's
exact share of the gradient. So the prompt's keys get the sum over its responses.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SharedAttention(torch.autograd.Function):
    """query [t, n, d], key and value [t, n_kv, d] -> [t, n, d].

    `lengths`: tokens of each sequence; `followers`: for each sequence, how many of the next attend to it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        followers: tuple[int, ...],
        scale: float | None,
    ) -> Tensor:
        q, k, v = (_heads_first(x) for x in (query, key, value))
        out, lse = (
            torch.empty_like(q),
            q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)),
        )
        for span in _spans(lengths):
            out[:, :, span], lse[:, :, span] = _attend(q, k, v, span, span, True, scale)
        for prompt, span in _after(lengths, followers):
            other, other_lse = _attend(q, k, v, span, prompt, False, scale)
            both = torch.logaddexp(lse[:, :, span], other_lse)
            own_share, share = (torch.exp(x - both)[..., None] for x in (lse[:, :, span], other_lse))
            out[:, :, span] = (out[:, :, span] * own_share + other * share).to(out.dtype)
            lse[:, :, span] = both
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.lengths, ctx.followers, ctx.scale = lengths, followers, scale
        return out[0].transpose(0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        g, q, k, v = (_heads_first(x) for x in (grad, query, key, value))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        parts = [(span, span, True) for span in _spans(ctx.lengths)]
        parts += [(span, prompt, False) for prompt, span in _after(ctx.lengths, ctx.followers)]
        for rows, columns, causal in parts:
            inputs = (g[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns])
            found = _flash_backward(
                *inputs, out[:, :, rows], lse[:, :, rows].contiguous(), 0.0, causal, scale=ctx.scale
            )
            for total, place, part in zip((dq, dk, dv), (rows, columns, columns), found, strict=True):
                total[:, :, place] += part
        return *(x[0].transpose(0, 1) for x in (dq, dk, dv)), None, None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output [1, n, rows, d] of these queries over these keys, and its logsumexp [1, n, rows]."""
    out, lse = _flash(q[:, :, rows], k[:, :, columns], v[:, :, columns], 0.0, causal, scale=scale)
    return out, lse


def _heads_first(x_tnd: Tensor) -> Tensor:
    return x_tnd.transpose(0, 1)[None]


def _spans(lengths: tuple[int, ...]) -> list[slice]:
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _after(lengths: tuple[int, ...], followers: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Return (span of a prompt, span of all its responses) for every prompt that has followers."""
    spans = _spans(lengths)
    return [
        (spans[i], slice(spans[i + 1].start, spans[i + count].stop))
        for i, count in enumerate(followers)
        if count
    ]
