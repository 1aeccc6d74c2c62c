"""A teacher that the trainer holds: a second Megatron model, of any size, in the policy's parallel layout.

It has no gradient buffers and no optimizer. On a GPU its weights are on the host between its passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_gvpo.config.schema import Config
from megatron_gvpo.megatron.device_memory import DeviceMemory
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.megatron.scorer import score
from megatron_gvpo.megatron.teacher.states import TeacherStates, teacher_states
from megatron_gvpo.types import TrainBatch


class Teacher:
    """Scores rows, and gives hidden states of the policy's micro-batches. Every rank calls every method."""

    def __init__(self, config: Config) -> None:
        assert config.teacher is not None, "the run has no teacher"
        given = {"path": config.teacher.path, "trust_remote_code": config.teacher.trust_remote_code}
        # Not in FP8, which would round its log-probs, and for which its sizes are not checked.
        own = config.model.model_copy(update={**given, "adapter": None, "fp8": None})
        train = config.train
        self._model = build(
            own,
            config.parallel,
            train.deterministic,
            trained=False,
            share_prompts=train.share_prompts,
            key="teacher.path",
        )
        self._memory = DeviceMemory((self._model, None))
        self._budget = train.max_tokens_per_micro_batch * config.parallel.cp
        self._temperature = config.rollout.temperature if config.algorithm.samples_from_policy else 1.0
        self._put_aside()

    def score(self, rows: TrainBatch) -> Tensor:
        """Return its log-probs of the response tokens, fp32 [r] on the CPU of every rank."""
        with self._on_device():
            return score(self._model, rows.with_columns(routing=None), self._budget, self._temperature)

    def states(self, packs: Sequence[TrainBatch]) -> TeacherStates:
        """Return its hidden states of the policy's micro-batches, and its output weight."""
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
