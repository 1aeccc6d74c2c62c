"""Corrects marks on parameters by which Megatron sums their gradients over ranks (GPT-OSS has both kinds)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def correct_marks(chunks: Iterable[Any]) -> None:
    """Correct the marks of megatron-core (0.19.2) before it wraps the chunks.

    Attention sinks are those of a tensor-parallel rank's heads, and are not marked so: the norm that clips
    the gradient would count the first rank's sinks only (Megatron-LM issue 7452, finding 8).

    Biases of experts are marked as those behind sequence-parallel layers, whose gradients are summed over the
    tensor-parallel ranks. But experts have data-parallel groups of their own, which sum them already.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(".softmax_offset"):
                parameter.tensor_model_parallel = True
                parameter.partition_dim = 0
                parameter.partition_stride = 1
            of_experts = not getattr(parameter, "allreduce", True)  # only linear layers have the mark
            if of_experts and getattr(parameter, "sequence_parallel", False):
                parameter.sequence_parallel = False
