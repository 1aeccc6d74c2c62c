"""Causal attention over a pack on CPU; the cost is the sum of the sequences' squared lengths.

PyTorch has no variable-length attention for CPUs. So its flash kernel gets the pack sequence by sequence, as
views: no padding, no copies of the inputs, and a sequence's keys stay in the cache. Neighbours of equal
length are computed together. One autograd function (`attention/merged.py`) spans the whole pack, because a
function a sequence would cost more than short sequences do. It also lets several query heads share a key
head, which the kernel supports and its public function does not.

RoPE is applied here too, to the whole pack at once, because megatron-core's unfused rotary embedding loops
over the sequences of a pack.

Under context parallelism a rank has two chunks of every sequence's queries, and gathers all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_gvpo.megatron.attention.core import OwnPackedSeqParams
from megatron_gvpo.megatron.attention.merged import PackPart, Spans, merged_attention
from megatron_gvpo.megatron.attention.rotary import rotate
from megatron_gvpo.megatron.batch import context_parallel_indices

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class LocalAttention(MegatronModule):
    """Attention with the interface of megatron-core's core attention, for `thd` packs, without dropout.

    query [t, n, d], key and value [t, n_kv, d] of this rank -> [t, n * d]. With `softmax_type: learnable`
    every head has a sink: a score, `softmax_offset`, that takes probability and gives no value (GPT-OSS).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group, self.tp_group = groups.cp, groups.tp
        self.scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size if windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        self.positions = config.qk_pos_emb_head_dim if config.multi_latent_attention else 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: OwnPackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        pack = packed_seq_params
        assert pack is not None and pack.sequences is not None, "LocalAttention needs packed sequences"
        lengths = pack.sequences.all.lengths
        if self.positions:
            key = self._sum_positional_gradient(key)
        if pack.angles_t is not None:
            interleaved = self.config.rotary_interleaved
            query, key = (rotate(x, pack.angles_t, interleaved) for x in (query, key))
        if self.cp_group.size() > 1:
            return self._across_ranks(query, key, value, lengths).flatten(1)
        beyond_window = self.window is not None and max(lengths) > self.window[0] + 1
        if beyond_window or self.softmax_offset is not None:
            parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
            return torch.cat([self._masked(q, k, v, 0) for q, k, v in parts]).flatten(1)
        return merged_attention(query, key, value, pack.sequences, LocalKernel(), self.scale).flatten(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Each tensor-parallel rank has the sinks of its own heads, as in megatron-core's attention."""
        assert metadata is not None
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state

    def _across_ranks(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Attend from this rank's queries [t / cp, n, d] to the keys of the whole pack up to each query."""
        parts, part = self.cp_group.size(), self.cp_group.rank()
        gathered = torch.cat([context_parallel_indices(list(lengths), parts, i) for i in range(parts)])
        order = torch.argsort(gathered)
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)[order]
            for x in (key, value)  # backward: reduce-scatter
        )
        out, first, begin = [], 0, 0
        for length in lengths:
            size = length // (2 * parts)
            for chunk in (part, 2 * parts - 1 - part):
                end = begin + (chunk + 1) * size
                q, k, v = query[first : first + size], key[begin:end], value[begin:end]
                out.append(self._masked(q, k, v, chunk * size))
                first += size
            begin += length
        return torch.cat(out)

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, begin: int) -> Tensor:
        """Attend from a sequence's queries [q, n, d], the first at position `begin`, to its keys."""
        seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(begin)
        if self.window is not None:
            seen = seen.triu(begin - self.window[0])
        if self.softmax_offset is not None:
            return self._with_sinks(query, key, value, seen)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, seen, scale=self.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def _with_sinks(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """Like `_masked`, but each query also attends to its head's sink. `seen` [q, k] is the mask."""
        assert self.softmax_offset is not None
        shared = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores_nqk = torch.einsum("qnd,knd->nqk", query, key).float() * scale
        sink = self.softmax_offset.float()[:, None, None].expand(-1, len(query), 1)
        scores_nqk = torch.cat([scores_nqk.masked_fill(~seen, float("-inf")), sink], dim=-1)
        shares_nqk = scores_nqk.softmax(dim=-1)[..., :-1].to(value.dtype)
        return torch.einsum("nqk,knd->qnd", shares_nqk, value)

    def _sum_positional_gradient(self, key: Tensor) -> Tensor:
        """Sum the gradient of the positional part of MLA's keys over the tensor-parallel ranks.

        All heads share that part. megatron-core's local layers gather it, but leave every rank with the
        gradient of its own heads only.
        """
        own, shared = key.split([key.shape[-1] - self.positions, self.positions], dim=-1)
        shared = copy_to_tensor_model_parallel_region(shared)  # backward: all-reduce
        return torch.cat([own, shared], dim=-1)


class InterleavedAttention(LocalAttention):
    """Attention of Gemma 3: every sixth layer sees the whole sequence, and the others a window."""

    def __init__(self, config: Any, layer_number: int, *arguments: Any, **named: Any) -> None:
        super().__init__(config, layer_number, *arguments, **named)
        everywhere = layer_number % sum(config.interleaved_attn_pattern) == 0
        self.window = None if everywhere else (config.window_size - 1, 0)


class LocalKernel:
    """PyTorch's flash attention for CPUs as a `PartialAttention`."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PackPart,
    ) -> tuple[Tensor, Tensor]:
        q = _cut(query, part.rows, part.columns)
        k, v = (_cut(x, part.columns, part.rows) for x in (key, value))
        results = [_flash(*run, 0.0, part.causal, scale=part.scale) for run in zip(q, k, v, strict=True)]
        lse = [lse.transpose(0, 1).flatten(1) for _, lse in results]
        return _pack([out for out, _ in results]), torch.cat(lse, dim=1)

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
        g, q, o, s = (_cut(x, part.rows, part.columns) for x in (grad, query, out, lse.t()[..., None]))
        k, v = (_cut(x, part.columns, part.rows) for x in (key, value))
        statistics = [x.squeeze(-1).contiguous() for x in s]
        runs = zip(g, q, k, v, o, statistics, strict=True)
        grads = [_flash_backward(*run, 0.0, part.causal, scale=part.scale) for run in runs]
        dq, dk, dv = (_pack(pieces) for pieces in zip(*grads, strict=True))
        return dq, dk, dv


def _cut(x_tnd: Tensor, spans: Spans, others: Spans) -> list[Tensor]:
    """Return views [b, n, length, d] of the spans, each of b neighbours of equal length.

    Neighbours also have equal lengths in `others`.
    """
    pairs = zip(spans.lengths, others.lengths, strict=True)
    runs = [(length, len(list(run))) for (length, _), run in groupby(pairs)]
    pieces = x_tnd.split([length * count for length, count in runs])
    return [
        piece.unflatten(0, (count, length)).transpose(1, 2)
        for piece, (length, count) in zip(pieces, runs, strict=True)
    ]


def _pack(sequences: Sequence[Tensor]) -> Tensor:
    """The inverse of `_cut`: a list of [b, n, length, d] -> [t, n, d]."""
    pieces = [x.transpose(1, 2).flatten(0, 1) for x in sequences]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
