"""A teacher that the trainer holds: a second Megatron model, of any size, in the policy's parallel layout.

It has no gradient buffers and no optimizer. On a GPU its weights are on the host between its passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_gvpo.megatron import forward
from megatron_gvpo.megatron.device_memory import DeviceMemory
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.megatron.reference_weights import host_like
from megatron_gvpo.megatron.scorer import score
from megatron_gvpo.megatron.teacher_head import OutputWeight
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.reward_servers import TeacherConfig
from megatron_gvpo.settings.sections import ModelConfig, TrainConfig
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from megatron_gvpo.megatron.batch import PackedBatch
    from megatron_gvpo.megatron.model.model import Model


class Teacher:
    """Scores rows, and gives hidden states of the policy's micro-batches. Every rank calls every method."""

    def __init__(
        self,
        options: TeacherConfig,
        policy: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        temperature: float,
    ) -> None:
        """`policy`: the policy's settings, from which the teacher takes those that `options` lack."""
        source = {"path": options.path, "trust_remote_code": options.trust_remote_code}
        # The teacher is not in FP8, which would round its log-probs, and for which its sizes are not checked.
        own = policy.model_copy(update={**source, "adapter": None, "fp8": None})
        self._model = build(
            own,
            parallel,
            train.deterministic,
            trained=False,
            share_prompts=train.share_prompts,
            key="teacher.path",
        )
        self._memory = DeviceMemory((self._model, None), is_constant=True)
        self._budget = train.max_tokens_per_micro_batch * parallel.cp
        self._temperature = temperature
        self._put_aside()

    def score(self, rows: TrainBatch) -> Tensor:
        """Return the teacher's log-probs of the response tokens, fp32 [r] on the CPU of every rank."""
        with self._on_device():
            return score(self._model, rows.with_columns(routing=None), self._budget, self._temperature)

    def states(self, packs: Sequence[TrainBatch]) -> TeacherStates:
        """Return the teacher's hidden states of the policy's micro-batches, and its output weight."""
        with self._on_device():
            return teacher_states(self._model, packs)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        self._memory.restore("weights")
        try:
            yield
        finally:
            self._put_aside()

    def _put_aside(self) -> None:
        if torch.cuda.is_available():
            self._memory.release("weights")


@dataclass(frozen=True)
class TeacherStates:
    """A model's last hidden states at the response tokens of micro-batches, for the policy's head.

    They are computed for all micro-batches of an update before the policy's own pass, and kept on the host: a
    token takes h numbers of the model's dtype, where its logits would take v numbers. Only the last pipeline
    stage has them; on the others, `hidden` is empty and `output` None.
    """

    hidden: list[Tensor]  # [r, h] for every micro-batch: the tokens of this context-parallel rank
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
        states_rh = forward.response_states(hidden_states, output_layer, batch)
        # Only this stream reads the copy: the pass of the policy copies it back.
        self.hidden.append(host_like(states_rh, states_rh.dtype).copy_(states_rh, non_blocking=True))
        if self.output is None:
            weight_vh = output_layer.weight if output_weight is None else output_weight
            self.output = OutputWeight(weight_vh, self._vocab_size)
        return hidden_states.new_zeros(())


def _no_loss(_: TrainBatch, zero: Tensor) -> tuple[Tensor, None]:
    return zero, None
