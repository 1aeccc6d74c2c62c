"""A second set of weights for the same model: a fixed reference policy, or a moving average.

Kept as host copies of this rank's shards and lent to the model for a scoring pass, so that a reference
costs host memory and a copy, never a second model on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_gvpo.megatron.model import Model


class Shadow:
    """Holds the weights that the model has when this is built."""

    def __init__(self, model: Model) -> None:
        self._settle = model.settle
        self._about_to_change = model.about_to_change
        self._parameters = [p for chunk in model.chunks for p in chunk.parameters()]
        self._copies: list[Tensor] = []
        self.capture()

    @torch.no_grad()
    def capture(self) -> None:
        """Take the model's present weights."""
        self._settle()
        self._copies = [p.detach().to("cpu", copy=True) for p in self._parameters]

    def copies(self) -> dict[int, Tensor]:
        """Its weights, by the `id` of the model's parameters."""
        return {id(p): copy for p, copy in zip(self._parameters, self._copies, strict=True)}

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Exponential moving average: copy <- decay * copy + (1 - decay) * weight."""
        self._about_to_change()
        self._settle()
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            copy.lerp_(parameter.detach().to("cpu"), 1.0 - decay)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """The model has these weights inside the block, and its own again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._about_to_change()
        self._settle()
        for i, parameter in enumerate(self._parameters):
            own = parameter.detach().to("cpu", copy=True)
            parameter.copy_(self._copies[i])
            self._copies[i] = own
