"""A second set of weights for the same model: a fixed reference policy, or a moving average.

Kept as host copies of this rank's shards and lent to the model for a scoring pass, so that a reference
costs host memory and a copy, never a second model on the device. One that moves is kept in fp32: bf16 has
steps of 0.4 %, and rounds a slow average back to where it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from torch import Tensor

from megatron_gvpo.megatron.model.build import Model


class ReferenceWeights:
    """Holds the weights that the model has when this is built; `decay`: of a moving average, None: fixed."""

    def __init__(self, model: Model, decay: float | None) -> None:
        self._settle = model.settle
        self._about_to_change = model.about_to_change
        self._decay = decay
        self._parameters = [p for chunk in model.chunks for p in chunk.parameters()]
        self._copies: list[Tensor] = []
        self._own: list[Tensor] = []  # the model's while a moving average is lent
        self.capture()

    @torch.no_grad()
    def capture(self) -> None:
        """Take the model's present weights."""
        self._settle()
        dtype = None if self._decay is None else torch.float32
        self._copies = [_host(p, dtype or p.dtype).copy_(p) for p in self._parameters]

    def sharded(self, weights: dict[str, Any]) -> dict[str, Any]:
        """The model's sharded state (`checkpoint.weights_state`), these weights in the places of its own."""
        copies = {id(p): copy for p, copy in zip(self._parameters, self._copies, strict=True)}

        def placed(base: Any) -> Any:
            copy = copies.get(id(getattr(base, "data", None)))
            if copy is None:
                return base
            return replace(base, data=copy, **({"dtype": copy.dtype} if hasattr(base, "dtype") else {}))

        state: dict[str, Any] = dict_list_map_outplace(placed, weights)
        return state

    @torch.no_grad()
    def restore(self, weights: dict[str, Any], loaded: dict[str, Any]) -> None:
        """Take what was loaded for `sharded(weights)` and is in the model already, but for its precision."""
        self.capture()
        places = {id(p): i for i, p in enumerate(self._parameters)}
        for chunk, state in weights.items():
            for key, base in state.items():
                if (i := places.get(id(getattr(base, "data", None)))) is not None:
                    self._copies[i].copy_(loaded[chunk][key])

    @torch.no_grad()
    def follow(self) -> None:
        """Exponential moving average: copy <- decay * copy + (1 - decay) * weight. A fixed one stays."""
        if self._decay is None:
            return
        self._about_to_change()
        self._settle()
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            moved = copy.to(parameter.device, non_blocking=True)  # where there is CUDA, it is computed there
            copy.copy_(moved.lerp_(parameter.detach().float(), 1.0 - self._decay), non_blocking=True)
        _wait()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """The model has these weights inside the block, and its own again after it."""
        if not self._own and self._decay is not None:
            self._own = [_host(p, p.dtype) for p in self._parameters]
        # Fixed ones are what the model gets, bit for bit: they change places with its own meanwhile.
        own, back = (self._copies, self._copies) if self._decay is None else (self._own, None)
        self._exchange(self._copies, own)
        try:
            yield
        finally:
            self._exchange(own, back)

    @torch.no_grad()
    def _exchange(self, given: list[Tensor], taken: list[Tensor] | None) -> None:
        """Give the model these weights; those that it had are left in `taken`, which may be the same."""
        self._about_to_change()
        self._settle()
        for i, parameter in enumerate(self._parameters):
            had = None if taken is None else parameter.detach().clone()
            parameter.copy_(given[i], non_blocking=True)
            if taken is not None and had is not None:
                taken[i].copy_(had, non_blocking=True)
        _wait()


def _host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Of its shape, on the host: pinned where there is CUDA, where copies are several times as fast then."""
    return torch.empty(like.shape, dtype=dtype, pin_memory=torch.cuda.is_available())


def _wait() -> None:
    """Until the host's copies can be read."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
