"""The values of one client's model on this rank, in host memory while another client's model is used.

There is only one Megatron model with one optimizer. A client's model consists of the values of the trained
weights (adapters, or all), the optimizer's master weights and moments, and the accumulated gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.optimizer import Optimizer


@dataclass
class ModelState:
    """Copies of one model's tensors, in the order of `_tensors`."""

    tensors: list[Tensor]
    gradients: list[Tensor]  # the accumulated gradient, as Megatron's buffers hold it: one tensor a buffer
    steps: int  # optimizer updates

    def copy(self) -> ModelState:
        return ModelState([t.clone() for t in self.tensors], [t.clone() for t in self.gradients], self.steps)


class Slot:
    """The only model that can compute: Megatron's model and optimizer on this rank."""

    def __init__(self, model: Model, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.gradients = [torch.zeros_like(buffer) for buffer in model.gradient_buffers()]

    def read(self) -> ModelState:
        """Copy the values to the host. A collective where weights are still being gathered."""
        self.model.finish_param_gather()
        return ModelState(
            [t.detach().to("cpu", copy=True) for t in self._tensors()],
            [t.to("cpu", copy=True) for t in self.gradients],
            self.optimizer.steps,
        )

    @torch.no_grad()
    def write(self, state: ModelState) -> None:
        """Copy the values back."""
        self.model.finish_background_work()
        for target, value in zip(self._tensors(), state.tensors, strict=True):
            target.copy_(value)
        for target, value in zip(self.gradients, state.gradients, strict=True):
            target.copy_(value)
        self.optimizer.steps = state.steps

    def read_weights(self) -> list[Tensor]:
        """Copy the trained weights alone to the host: a snapshot to sample from."""
        self.model.finish_param_gather()
        return [t.detach().to("cpu", copy=True) for t in self.model.trained_weights()]

    @torch.no_grad()
    def write_weights(self, weights: list[Tensor]) -> None:
        for target, value in zip(self.model.trained_weights(), weights, strict=True):
            target.copy_(value)

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.model.trained_weights()
        yield from self.optimizer.tensors()
        yield from self.optimizer.host_tensors()
