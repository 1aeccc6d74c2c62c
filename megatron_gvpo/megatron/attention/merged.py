"""Causal attention over a pack in which responses share the keys and values of their prompt.

Every sequence of the pack attends causally to itself. A response's queries also attend to its whole prompt.
The two parts are computed separately and merged by their softmax statistics (Milakov and Gimelshein, 2018; as
flash attention merges tiles, arXiv 2205.14135).

The backward pass is exact. For a probability p = exp(score - lse), the gradient of the score is
p (grad_out . value - grad_out . out), where `lse` is the logarithm of the softmax's denominator. A kernel
that gets the merged `out` and `lse` in place of its own therefore returns its part's share of the whole
gradient. The shares of a query add up, and a prompt's keys get the sum over its responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gvpo.types import on_device


@dataclass(frozen=True)
class Spans:
    """Consecutive spans of tokens; the first begins at the start of a tensor."""

    lengths: tuple[int, ...]  # tokens of every span, at least 1
    ends: Tensor  # int32 [spans + 1] on the tokens' device: 0, then the end of every span

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Spans:
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Spans(tuple(lengths), on_device(ends, device))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True)
class Sequences:
    """The sequences of a pack. Prompts that are shared come first, and then the responses to them."""

    all: Spans
    prompts: Spans | None = None  # the shared prompts; None if there are none
    responses: Spans | None = None  # one span for every shared prompt, which has all responses to it

    @staticmethod
    def of(lengths: Sequence[int], followers: Sequence[int], device: torch.device) -> Sequences:
        """`lengths`: tokens of each sequence. `followers`: see `PackedBatch`."""
        sequences = Spans.of(lengths, device)
        if not followers:
            return Sequences(sequences)
        behind = iter(lengths[len(followers) :])
        responses = [sum(islice(behind, count)) for count in followers]
        prompts = Spans.of(lengths[: len(followers)], device)
        return Sequences(sequences, prompts, Spans.of(responses, device))


@dataclass(frozen=True)
class PackPart:
    """A part of a pack's attention: from spans of queries (`rows`) to as many spans of keys (`columns`)."""

    rows: Spans
    columns: Spans
    causal: bool  # rows and columns are equal, and no query attends to later keys
    scale: float | None  # multiplies the scores; None: 1 / sqrt(d)


class PartialAttention(Protocol):
    """A kernel of attention."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PackPart,
    ) -> tuple[Tensor, Tensor]:
        """query [t, n, d], key and value [s, n_kv, d] -> output [t, n, d], logsumexp of scores [n, t].

        The logsumexp is in fp32, or in fp64 if the queries are.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        part: PackPart,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in tensors of their own.

        `out` and `lse` are those of the whole softmax, of which these keys may be a part.
        """
        ...


def merged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    kernel: PartialAttention,
    scale: float | None,
) -> Tensor:
    """query [t, n, d], key and value [t, n_kv, d] -> [t, n, d]."""
    out_tnd: Tensor = _Merged.apply(query, key, value, sequences, kernel, scale)
    return out_tnd


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: Sequences,
        kernel: PartialAttention,
        scale: float | None,
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value, PackPart(sequences.all, sequences.all, True, scale))
        if (prompts := sequences.prompts) is not None and (responses := sequences.responses) is not None:
            front, behind = _slices(prompts, responses)
            of_prompts = PackPart(responses, prompts, False, scale)
            other, other_lse = kernel.forward(query[behind], key[front], value[front], of_prompts)
            own, own_lse = out[behind], lse[:, behind]
            share_n = torch.sigmoid(other_lse - own_lse).t()[..., None]  # the prompt's share of the softmax
            own.copy_(torch.lerp(own.to(lse.dtype), other.to(lse.dtype), share_n))
            own_lse.copy_(torch.logaddexp(own_lse, other_lse))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.sequences, ctx.kernel, ctx.scale = sequences, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        sequences, kernel, scale = ctx.sequences, ctx.kernel, ctx.scale
        pack = PackPart(sequences.all, sequences.all, True, scale)
        total = kernel.backward(grad, query, key, value, out, lse, pack)
        if sequences.prompts is not None:
            front, behind = _slices(sequences.prompts, sequences.responses)
            shares = kernel.backward(
                grad[behind],
                query[behind],
                key[front],
                value[front],
                out[behind],
                lse[:, behind],
                PackPart(sequences.responses, sequences.prompts, False, scale),
            )
            for gradient, tokens, share in zip(total, (behind, front, front), shares, strict=True):
                gradient[tokens] += share
        return *total, None, None, None


def _slices(prompts: Spans, responses: Spans) -> tuple[slice, slice]:
    """Return the pack's slices of the shared prompts and of all responses to them."""
    return slice(0, prompts.tokens), slice(prompts.tokens, prompts.tokens + responses.tokens)
