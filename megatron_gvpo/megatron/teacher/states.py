"""A model's last hidden states at the response tokens of micro-batches, for the policy's head.

They are computed for all micro-batches of an update before the policy's own pass, and kept on the host: a
token takes h numbers of the model's dtype, and logits of it would take v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_gvpo.megatron import forward
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.teacher.divergence import OutputWeight
from megatron_gvpo.types import TrainBatch


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's part in the head; both are None, or empty, except on the last pipeline stage."""

    hidden: list[
        Tensor
    ]  # [r, h] for every micro-batch, on the host: the tokens of this context-parallel rank
    output: OutputWeight | None

    def beside(self, packs: Sequence[TrainBatch]) -> list[TrainBatch]:
        """Return the micro-batches with the hidden states of each."""
        if self.output is None:
            return list(packs)
        return [p.with_columns(teacher_rh=h) for p, h in zip(packs, self.hidden, strict=True)]


def teacher_states(model: Model, packs: Sequence[TrainBatch]) -> TeacherStates:
    """Run the model over the policy's micro-batches, without gradient."""
    head = _KeepStates(model.vocab_size)
    forward.run(model, packs, _no_loss, head=head, forward_only=True)
    return TeacherStates(head.hidden, head.output)


class _KeepStates:
    """A head that keeps hidden states, and the output weight as it is in the first micro-batch.

    It returns neither: Megatron's wrapper would convert them to fp32.
    """

    def __init__(self, vocab_size: int) -> None:
        self.hidden: list[Tensor] = []
        self.output: OutputWeight | None = None
        self._vocab_size = vocab_size

    def __call__(
        self, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, batch: PackedBatch
    ) -> Tensor:
        self.hidden.append(forward.response_states(hidden_states, output_layer, batch).cpu())
        if self.output is None:
            weight_vh = output_layer.weight if output_weight is None else output_weight
            self.output = OutputWeight(weight_vh, self._vocab_size)
        return hidden_states.new_zeros(())


def _no_loss(_: TrainBatch, zero: Tensor) -> tuple[Tensor, None]:
    return zero, None
