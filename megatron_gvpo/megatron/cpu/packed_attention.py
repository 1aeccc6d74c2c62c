"""Causal attention over a pack on CPU; the cost is the sum of the sequences' squared lengths.

PyTorch has no variable-length attention for CPUs. So its flash kernel gets the pack sequence by sequence, as
views: no padding, no copies of the inputs, and a sequence's keys stay in the cache. Neighbours of equal
length go together. One autograd function spans the whole pack, because a function a sequence would cost more
than short sequences do. It also lets several query heads share a key head, which the kernel supports and its
public function does not.

RoPE is applied here too, to the whole pack at once, because megatron-core's unfused rotary embedding loops
over the sequences of a pack. `defer_rotary` removes it from the model's own path.

Under context parallelism a rank has two chunks of every sequence's queries, and gathers all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from megatron_gvpo.megatron.batch import context_parallel_indices
from megatron_gvpo.megatron.cpu.rotary import rotate
from megatron_gvpo.megatron.cpu.shared_prompts import SharedAttention

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class LocalPackedSeqParams(PackedSeqParams):
    """PackedSeqParams with the inputs of the local attention, computed once a micro-batch."""

    angles_t: tuple[Tensor, Tensor] | None = None  # cosine and sine of every token's position; see rotary.py
    lengths: tuple[int, ...] = ()  # of the sequences, in tokens
    followers: tuple[int, ...] = ()  # see PackedBatch; empty if no prompt is shared


class _NoRotary(torch.nn.Module):
    """Returns no frequencies, so that megatron-core's attention does not rotate queries and keys."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None

    @staticmethod
    def get_rotary_seq_len(*args: Any, **kwargs: Any) -> int:
        return 0


def defer_rotary(model: Any) -> Any:
    """Remove the rotary module from a GPTModel and return it; the caller puts its angles into the pack."""
    rotary, model.rotary_pos_emb = model.rotary_pos_emb, _NoRotary()
    return rotary


class LocalAttention(MegatronModule):
    """Attention with the interface of megatron-core's core attention, for `thd` packs, without dropout.

    query [t, n, d], key and value [t, n_kv, d] of this rank -> [t, n * d].
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
        self.cp_group = groups.cp
        self.scale = softmax_scale
        self.window = config.window_size
        self.positions = config.qk_pos_emb_head_dim if config.multi_latent_attention else 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: LocalPackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        pack = packed_seq_params
        assert pack is not None and pack.lengths, "LocalAttention needs packed sequences"
        if self.positions:
            key = self._sum_positional_gradient(key)
        if pack.angles_t is not None:
            interleaved = self.config.rotary_interleaved
            query, key = (rotate(x, pack.angles_t, interleaved) for x in (query, key))
        if self.cp_group.size() > 1:
            return self._across_ranks(query, key, value, pack.lengths).flatten(1)
        if self.window is not None and max(pack.lengths) > self.window[0] + 1:
            parts = zip(*(x.split(pack.lengths) for x in (query, key, value)), strict=True)
            return torch.cat([self._masked(q, k, v, 0) for q, k, v in parts]).flatten(1)
        if any(pack.followers):
            shared = (pack.lengths, pack.followers)
            out: Tensor = SharedAttention.apply(query, key, value, *shared, self.scale)
            return out.flatten(1)
        out_tnd: Tensor = _PackedAttention.apply(query, key, value, pack.lengths, self.scale)
        return out_tnd.flatten(1)

    def _across_ranks(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Attend from this rank's queries [t / cp, n, d] to the keys of the whole pack up to each query."""
        parts, part = self.cp_group.size(), self.cp_group.rank()
        held = torch.cat([context_parallel_indices(list(lengths), parts, i) for i in range(parts)])
        order = torch.argsort(held)
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)[order]
            for x in (key, value)  # backward: reduce-scatter
        )
        out, mine, begin = [], 0, 0
        for length in lengths:
            size = length // (2 * parts)
            for chunk in (part, 2 * parts - 1 - part):
                end = begin + (chunk + 1) * size
                q, k, v = query[mine : mine + size], key[begin:end], value[begin:end]
                out.append(self._masked(q, k, v, chunk * size))
                mine += size
            begin += length
        return torch.cat(out)

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, begin: int) -> Tensor:
        """Attend from a sequence's queries [q, n, d], the first at position `begin`, to its keys."""
        seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(begin)
        if self.window is not None:
            seen = seen.triu(begin - self.window[0])
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, seen, scale=self.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def _sum_positional_gradient(self, key: Tensor) -> Tensor:
        """Sum the gradient of the positional part of MLA's keys over the tensor-parallel ranks.

        All heads share that part. megatron-core's local layers gather it, but leave every rank with the
        gradient of its own heads only.
        """
        own, shared = key.split([key.shape[-1] - self.positions, self.positions], dim=-1)
        shared = copy_to_tensor_model_parallel_region(shared)  # backward: all-reduce
        return torch.cat([own, shared], dim=-1)


class _PackedAttention(torch.autograd.Function):
    """query [t, n, d], key and value [t, n_kv, d] -> [t, n, d], causal within each sequence."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float | None
    ) -> Tensor:
        sequences = zip(*(_sequences(x, lengths) for x in (query, key, value)), strict=True)
        results = [_flash(q, k, v, 0.0, True, scale=scale) for q, k, v in sequences]
        out = _pack([out for out, _ in results])
        ctx.save_for_backward(query, key, value, out, *(logsumexp for _, logsumexp in results))
        ctx.lengths, ctx.scale = lengths, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *logsumexps = ctx.saved_tensors
        inputs = zip(
            *(_sequences(x, ctx.lengths) for x in (grad, query, key, value, out)), logsumexps, strict=True
        )
        grads = [_flash_backward(*sequence, 0.0, True, scale=ctx.scale) for sequence in inputs]
        return *(_pack(pieces) for pieces in zip(*grads, strict=True)), None, None


def _sequences(x_tnd: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """Return views [b, n, length, d], one for each run of b neighbours of equal length."""
    views, begin = [], 0
    for length, run in groupby(lengths):
        end = begin + length * len(list(run))
        views.append(x_tnd[begin:end].unflatten(0, (-1, length)).transpose(1, 2))
        begin = end
    return views


def _pack(sequences: Sequence[Tensor]) -> Tensor:
    """The inverse of `_sequences`: a list of [b, n, length, d] -> [t, n, d]."""
    pieces = [x.transpose(1, 2).flatten(0, 1) for x in sequences]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
