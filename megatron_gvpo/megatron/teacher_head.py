"""The divergence from a teacher, which the policy's head computes for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_gvpo.kernels.divergence import Divergence
from megatron_gvpo.kernels.linear_divergence import LinearDivergence, TeacherLogits, linear_divergence
from megatron_gvpo.kernels.mathematics import accumulator
from megatron_gvpo.megatron.batch import PackedBatch


class OutputWeight:
    """A copy of this rank's shard of a model's output weight, [v, h]."""

    def __init__(self, weight_vh: Tensor, vocab_size: int) -> None:
        """`vocab_size`: tokens of the whole vocabulary, without padding."""
        self.vocab_size = vocab_size
        self._weight_vh = weight_vh.detach().clone()
        self._shard = len(weight_vh)

    def cut(self, shard: int) -> Tensor:
        """Return the rows of this tensor-parallel rank's tokens where each rank has `shard` of them.

        There are fewer rows where the vocabulary ends. Two models may divide their vocabularies differently:
        then the first call is a collective of the tensor-parallel group. Every call has the same `shard`.
        """
        if self._shard != shard:
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(self._weight_vh) for _ in range(group.size())]
            dist.all_gather(parts, self._weight_vh, group=group)
            first = group.rank() * shard
            self._weight_vh = torch.cat(parts)[first : first + shard].clone()
            self._shard = shard
        return self._weight_vh


@dataclass(frozen=True)
class HeadDivergence:
    """A divergence that the head computes besides log-probs, or alone: then log-probs have no gradient."""

    divergence: Divergence
    weight: float  # the weight of every token's divergence in the loss
    output: OutputWeight  # the teacher's output weight
    alone: bool

    def of(
        self,
        hidden_rh: Tensor,
        weight_vh: Tensor,
        batch: PackedBatch,
        temperature: float,
        vocab_size: int,
        upstream: float,
    ) -> LinearDivergence:
        """Compute the divergence at the policy's hidden states, given its output weight and vocabulary.

        `upstream`: the factor by which the loss that is differentiated multiplies it.
        """
        teacher_rh = batch.rows.teacher_rh
        assert teacher_rh is not None, "a divergence needs the teacher's hidden states"
        return linear_divergence(
            hidden_rh,
            weight_vh,
            TeacherLogits(teacher_rh, self.output.cut(len(weight_vh)), self.output.vocab_size),
            batch.label_r,
            hidden_rh.new_full((len(hidden_rh),), self.weight, dtype=accumulator(hidden_rh.dtype)),
            self.divergence,
            temperature=temperature,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            vocab_size=vocab_size,
            upstream=upstream,
        )
