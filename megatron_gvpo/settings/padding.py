"""Padding of a micro-batch's length, which a layout needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_gvpo.settings.parallel import ParallelConfig
    from megatron_gvpo.settings.sections import ModelConfig


@dataclass(frozen=True)
class Padding:
    """Multiples, in tokens, to which packs are padded. No other code computes them."""

    sequence: int  # each sequence's length is a multiple of this
    pack: int  # the whole pack's length is a multiple of this, which is a multiple of `sequence`

    @staticmethod
    def of(model: ModelConfig, parallel: ParallelConfig) -> Padding:
        """Returns the padding that a model and its parallel layout need.

        Context parallelism cuts every sequence into 2 cp chunks. Sequence parallelism cuts a rank's tokens
        into tp shards. FP8 kernels process a shard in blocks of tokens. Separate adapters of q, k and v are
        interleaved for tp tokens at a time.
        """
        sequence = 2 * parallel.cp if parallel.cp > 1 else 1
        in_shards = parallel.sequence_parallel or model.adapter is not None
        shards = parallel.cp * (parallel.tp if in_shards else 1)
        block = 1 if model.fp8 is None else model.fp8.tokens
        return Padding(sequence, math.lcm(sequence, shards * block))
