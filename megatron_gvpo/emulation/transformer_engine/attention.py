"""Fused attention and the statistics that it saves. Source: csrc/extensions/attention.cpp, common/fused_attn.

Each sequence is computed separately, in fp32, with all of its scores in memory.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_gvpo.emulation.transformer_engine.references import reference
from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Tensor = torch.Tensor


@dataclass(frozen=True)
class SeenKeys:
    """Which keys a query attends to. Distances are counted from the diagonal; -1 means no limit."""

    is_causal: bool
    window: tuple[int, int]  # keys before and after the diagonal
    is_bottom_right: bool  # the diagonal ends at the last query and key, otherwise it begins at the first

    @classmethod
    def of(cls, mask_type: Any, window: Any, bottom_right_diagonal: bool) -> SeenKeys:
        name = mask_type.name
        is_bottom_right = bottom_right_diagonal or name.endswith("BOTTOM_RIGHT_MASK")
        return cls("CAUSAL" in name, (window[0], window[1]), is_bottom_right)

    def hidden(self, queries: int, keys: int) -> Tensor:
        """Return a mask [queries, keys] that is true where a query does not attend to a key."""
        diagonal = torch.arange(queries)[:, None] + (keys - queries if self.is_bottom_right else 0)
        key = torch.arange(keys)[None]
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        left, right = self.window
        if self.is_causal:
            hidden |= key > diagonal
        if left >= 0:
            hidden |= key < diagonal - left
        if right >= 0:
            hidden |= key > diagonal + right
        return hidden


@dataclass(frozen=True)
class Heads:
    """One sequence's heads: q [q, h, d], k [k, g, d], v [k, g, dv]; h / g query heads share a key head."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor
    scale: float

    def scores(self) -> Tensor:
        """Return the scores [g, h / g, q, k]: minus infinity where a query does not attend to a key."""
        q_grqd = self._by_group(self.q)
        scores = torch.einsum("grqd,kgd->grqk", q_grqd, self.k) * self.scale
        return scores.masked_fill(self.hidden, -torch.inf)

    def _by_group(self, x_qhd: Tensor) -> Tensor:
        return x_qhd.unflatten(1, (self.k.shape[1], -1)).permute(1, 2, 0, 3)

    def forward(self, sink_h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs [q, h, dv] and the log-sum-exp [h, q] of the scores, the sink's included."""
        scores = self.scores()
        stats = scores.logsumexp(-1).flatten(0, 1)
        if sink_h is not None:
            stats = torch.logaddexp(stats, sink_h[:, None])
        out = torch.einsum("grqk,kgd->qgrd", self.weights(scores, stats), self.v)
        return out.flatten(1, 2), stats

    def weights(self, scores: Tensor, stats_hq: Tensor) -> Tensor:
        """Return the softmax of the scores: zeros for a query that attends to no key."""
        weights = torch.exp(scores - stats_hq.view(*scores.shape[:2], -1, 1))
        return torch.where(torch.isneginf(scores), 0.0, weights)

    def backward(self, stats_hq: Tensor, out: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, and the dot products [h, q] of outputs and their gradients."""
        weights = self.weights(self.scores(), stats_hq)
        grad_grqd = self._by_group(grad)
        d_v = torch.einsum("grqk,grqd->kgd", weights, grad_grqd)
        d_weights = torch.einsum("grqd,kgd->grqk", grad_grqd, self.v)
        dots = (out * grad).sum(-1).T  # [h, q]
        d_scores = weights * (d_weights - dots.reshape(*weights.shape[:2], -1, 1)) * self.scale
        d_q = torch.einsum("grqk,kgd->qgrd", d_scores, self.k).flatten(1, 2)
        d_k = torch.einsum("grqk,grqd->kgd", d_scores, self._by_group(self.q))
        return d_q, d_k, d_v, dots


@dataclass(frozen=True)
class Side:
    """The positions of the sequences in the tensor of the queries, or in that of the keys."""

    format: str  # sbhd, bshd, bhsd or thd
    length_b: list[int]
    begin_b: list[int]  # first token of each sequence; only packs (thd) use it

    @classmethod
    def of(
        cls, format: str, tensor: Tensor, cu_seqlens: Tensor, padded: Tensor | None, is_padded: bool
    ) -> Side:
        """In packs and padded batches the lengths come from `cu_seqlens` [b + 1]; other batches are full."""
        ends = alias(cu_seqlens).tolist()
        lengths = [end - begin for begin, end in itertools.pairwise(ends)]
        begins = ends if padded is None else alias(padded).tolist()
        if format != "thd" and not is_padded:
            length = tensor.shape[format.index("s")]
            lengths = [length] * len(lengths)
        return cls(format, lengths, begins[: len(lengths)])

    def in_format(self, format: str) -> Side:
        """The same sequences in a tensor of another format."""
        return replace(self, format=format)

    def sequence(self, tensor: Tensor, number: int) -> Tensor:
        """A view [tokens, heads, width] of one sequence."""
        length = self.length_b[number]
        if self.format == "thd":
            return tensor[self.begin_b[number] : self.begin_b[number] + length]
        if self.format == "sbhd":
            return tensor[:length, number]
        return (tensor[number] if self.format == "bshd" else tensor[number].transpose(0, 1))[:length]

    def stats(self, tensor: Tensor, number: int, heads: int) -> Tensor:
        """Return a view [heads, tokens] of one sequence's statistics in [t, h, 1] (packs) or [b, h, s, 1]."""
        if self.format == "thd":
            return self.sequence(tensor.view(-1, heads, 1), number)[..., 0].T
        return tensor.view(len(self.length_b), heads, -1)[number, :, : self.length_b[number]]


def _format(name: Any) -> str:
    """Return the format of one tensor, such as "thd" for NVTE_THD."""
    return str(name.name.removeprefix("NVTE_").lower())


def _formats(layout: Any) -> tuple[str, str]:
    """Return the formats of queries and keys, such as ("thd", "thd") for NVTE_THD_T2HD."""
    names = re.sub(r"\d", "", layout.name.removeprefix("NVTE_").removeprefix("Paged_KV_")).lower().split("_")
    return names[0], names[-1]


def _check(
    bias_type: Any, dropout: float, pages: Any, quantizers: tuple[Any, ...], tensors: tuple[Any, ...]
) -> None:
    refused = {
        f"bias {bias_type.name}": bias_type.name != "NVTE_NO_BIAS",
        "dropout": dropout > 0,
        "a paged cache": pages is not None,
        "FP8": any(q is not None for q in quantizers) or any(hasattr(t, "_quantizer") for t in tensors),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise NotImplementedError(f"fused attention with {name}")


def _sink(softmax_type: Any, offset: Tensor | None, heads: int) -> Tensor | None:
    """Return the scores [h] of the sink, a key without a value: 0 ("off by one") or learned; else None."""
    if "VANILLA" in softmax_type.name:
        return None
    return torch.zeros(heads) if offset is None else alias(offset).float().view(heads)


@dataclass(frozen=True)
class Batch:
    """The sequences of one call: their positions in the tensors, and the mask of their keys."""

    queries: Side
    keys: Side
    heads: int
    mask: SeenKeys
    scale: float

    @classmethod
    def of(
        cls,
        layout: Any,
        q: Tensor,
        k: Tensor,
        ends: tuple[Tensor, Tensor],
        padded_ends: tuple[Tensor | None, Tensor | None],
        mask_type: Any,
        window: Any,
        bottom_right_diagonal: bool,
        scale: float,
    ) -> Batch:
        """`ends`: cumulative lengths [b + 1] of queries and of keys; `padded_ends`: the same with padding."""
        is_padded = "PADDING" in mask_type.name
        queries, keys = (
            Side.of(format, tensor, own_ends, own_padded, is_padded)
            for format, tensor, own_ends, own_padded in zip(
                _formats(layout), (q, k), ends, padded_ends, strict=True
            )
        )
        heads = q.shape[1 if queries.format in ("thd", "bhsd") else 2]
        return cls(queries, keys, heads, SeenKeys.of(mask_type, window, bottom_right_diagonal), scale)

    def sequences(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[int, Heads]]:
        """Yield each sequence's number and its heads."""
        tensors = [alias(tensor) for tensor in (q, k, v)]
        sides = (self.queries, self.keys, self.keys)
        for number, lengths in enumerate(zip(self.queries.length_b, self.keys.length_b, strict=True)):
            own_q, own_k, own_v = (
                side.sequence(tensor, number).float() for side, tensor in zip(sides, tensors, strict=True)
            )
            yield number, Heads(own_q, own_k, own_v, self.mask.hidden(*lengths), self.scale)


@reference
def fused_attn_fwd(
    result: list[Any],
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Tensor | None,
    page_table_v: Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    bias: Tensor | None,
    softmax_offset: Tensor | None,
    rng_gen: Any,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> None:
    """`result`: the outputs, the statistics, and each query's largest score if `return_max_logit` is set.

    The statistics are the log-sum-exp of the scores, in fp32. Statistics of padding are not written. Outputs
    of padding in a pack are zeros.
    """
    _check(bias_type, p_dropout, page_table_k, (s_quantizer, o_quantizer), (q, k, v))
    batch = Batch.of(
        qkv_layout,
        q,
        k,
        (cu_seqlens_q, cu_seqlens_kv),
        (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        attn_mask_type,
        window_size,
        bottom_right_diagonal,
        attn_scale,
    )
    out_side = batch.queries.in_format(_format(o_format))
    sink_h = _sink(softmax_type, softmax_offset, batch.heads)
    out, stats = alias(result[0]), alias(result[1])
    if out_side.format == "thd":
        out.zero_()
    for number, sequence in batch.sequences(q, k, v):
        out_qhd, stats_hq = sequence.forward(sink_h)
        out_side.sequence(out, number).copy_(out_qhd)
        batch.queries.stats(stats, number, batch.heads).copy_(stats_hq)
        if return_max_logit:
            largest_hq = sequence.scores().amax(-1).flatten(0, 1)
            batch.queries.stats(alias(result[2]), number, batch.heads).copy_(largest_hq)


@reference
def fused_attn_bwd(
    result: list[Any],
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    d_out: Tensor,
    fake_dtype: torch.dtype,
    saved: list[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> None:
    """`result`: gradients of queries, keys, values, bias (or None) and softmax offset [1, h, 1, 1].

    `saved`: the tensors that the forward pass returned after its outputs. Gradients of a pack's padding are
    zeros.
    """
    _check(bias_type, p_dropout, None, (s_quantizer, dp_quantizer, dqkv_quantizer), (q, k, v, out, d_out))
    batch = Batch.of(
        qkv_layout,
        q,
        k,
        (cu_seqlens_q, cu_seqlens_kv),
        (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        attn_mask_type,
        window_size,
        bottom_right_diagonal,
        attn_scale,
    )
    out_side, grad_side = (batch.queries.in_format(_format(format)) for format in (o_format, do_format))
    format_q, format_kv = _formats(dqkv_layout)
    side_kv = batch.keys.in_format(format_kv)
    gradient_sides = (batch.queries.in_format(format_q), side_kv, side_kv)
    stats = alias(saved[0])
    offset = None if "LEARNABLE" not in softmax_type.name else saved[-1]
    sink_h = _sink(softmax_type, offset, batch.heads)
    d_sink_h = torch.zeros(batch.heads)
    gradients = [alias(tensor) for tensor in result[:3]]
    for gradient, side in zip(gradients, gradient_sides, strict=True):
        if side.format == "thd":
            gradient.zero_()
    for number, sequence in batch.sequences(q, k, v):
        stats_hq = batch.queries.stats(stats, number, batch.heads)
        out_qhd = out_side.sequence(alias(out), number).float()
        grad_qhd = grad_side.sequence(alias(d_out), number).float()
        *values, dots_hq = sequence.backward(stats_hq, out_qhd, grad_qhd)
        for gradient, side, value in zip(gradients, gradient_sides, values, strict=True):
            side.sequence(gradient, number).copy_(value)
        if sink_h is not None:
            d_sink_h -= (torch.exp(sink_h[:, None] - stats_hq) * dots_hq).sum(1)
    if sink_h is not None:
        alias(result[4]).view(batch.heads).copy_(d_sink_h)
