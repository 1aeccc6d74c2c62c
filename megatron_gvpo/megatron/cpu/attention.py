"""Causal attention over a pack on CPU, at the cost of the sum of squares of the sequences.

PyTorch has no variable-length attention for CPUs, so the pack is unpacked into a few padded batches of
sequences of similar length, each goes through scaled_dot_product_attention, and the result is packed
again. Padding sits to the right, where a causal mask hides it: the result is exact.

RoPE is applied here too, to the whole pack at once: megatron-core's unfused rotary embedding for
packs loops over the sequences. `defer_rotary` takes it out of the model's own path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import divide
from torch import Tensor

_BUCKETS = 4  # measured: enough for ragged packs, and still few and large batches


@dataclass
class LocalPackedSeqParams(PackedSeqParams):
    """PackedSeqParams plus what the local attention needs; computed once a micro-batch."""

    freqs_t: Tensor | None = None  # rotary frequencies of every token's position [t, 1, 1, d]
    buckets: tuple[Tensor, ...] = ()  # token indices [b, length], a short sequence's last one repeated
    repack_t: Tensor | None = None  # where each packed token lies in the concatenated buckets


def length_buckets(lengths: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Split a pack into padded batches: (token indices [b, length] a bucket, repacking index [t])."""
    length_n = torch.tensor(lengths)
    start_n = torch.cumsum(length_n, 0) - length_n
    buckets, repack_t, filled = [], torch.empty(int(length_n.sum()), dtype=torch.int64), 0
    for rows in torch.tensor_split(torch.argsort(length_n), _BUCKETS):
        if not len(rows):
            continue
        longest = int(length_n[rows].max())
        column = torch.arange(longest)
        real = column < length_n[rows, None]
        index = start_n[rows, None] + torch.minimum(column, length_n[rows, None] - 1)
        repack_t[index[real]] = filled + torch.nonzero(real.flatten()).flatten()
        buckets.append(index)
        filled += index.numel()
    return tuple(buckets), repack_t


class _NoRotary(torch.nn.Module):
    """Returns no frequencies, so that megatron-core's attention leaves queries and keys as they are."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None

    @staticmethod
    def get_rotary_seq_len(*args: Any, **kwargs: Any) -> int:
        return 0


def defer_rotary(model: Any) -> Any:
    """Take the rotary module out of a GPTModel; the caller puts its frequencies into the pack."""
    rotary, model.rotary_pos_emb = model.rotary_pos_emb, _NoRotary()
    return rotary


class LocalAttention(MegatronModule):
    """Under the call contract of megatron-core's core attention, for `thd` packs, without dropout.

    query [t, n, d], key and value [t, n_kv, d] of this tensor-parallel rank -> [t, n * d].
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
        self.width = divide(config.kv_channels * config.num_attention_heads, groups.tp.size())

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
        assert pack is not None and pack.repack_t is not None, "local attention takes packs only"
        if pack.freqs_t is not None:
            query, key = (self._rotate(x, pack.freqs_t) for x in (query, key))
        shared = query.shape[1] // key.shape[1]
        if shared > 1:  # grouped-query attention: every key head serves `shared` query heads
            key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        outputs = []
        for index in pack.buckets:
            q, k, v = (_unpack(x, index) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            outputs.append(out.transpose(1, 2).reshape(index.numel(), self.width))
        return torch.cat(outputs).index_select(0, pack.repack_t)

    def _rotate(self, x_tnd: Tensor, freqs_t: Tensor) -> Tensor:
        rotated = apply_rotary_pos_emb(x_tnd.unsqueeze(1), freqs_t, self.config, cp_group=self.cp_group)
        return rotated.squeeze(1)


def _unpack(x_tnd: Tensor, index: Tensor) -> Tensor:
    """[t, n, d] -> [b, n, length, d]"""
    batch, length = index.shape
    return x_tnd.index_select(0, index.flatten()).view(batch, length, *x_tnd.shape[1:]).transpose(1, 2)
