"""A second set of the trained weights: a fixed reference policy, or a moving average.

The weights are host copies of this rank's shards. They are swapped into the model for a scoring pass. So a
reference costs host memory and a copy, never a second model on the device. A moving average is kept in fp32:
bf16 has steps of 0.4 % and would round a slow average back to its old value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from torch import Tensor

from megatron_gvpo.megatron.model.model import Model


class ReferenceWeights:
    """Holds the trained weights from the time of construction; `decay`: of a moving average, None: fixed."""

    def __init__(self, model: Model, decay: float | None) -> None:
        self._finish_param_gather = model.finish_param_gather
        self._finish_background_work = model.finish_background_work
        self._decay = decay
        self._parameters = [p for chunk in model.chunks for p in chunk.parameters() if p.requires_grad]
        self._copies: list[Tensor] = []
        self._own: list[Tensor] = []  # the model's own weights while a moving average is swapped in
        self._capture()

    @property
    def moves(self) -> bool:
        """True for a moving average."""
        return self._decay is not None

    @torch.no_grad()
    def _capture(self) -> None:
        """Copy the model's present weights."""
        self._finish_param_gather()
        dtype = None if self._decay is None else torch.float32
        self._copies = [host_like(p, dtype or p.dtype).copy_(p) for p in self._parameters]

    def sharded(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the model's sharded state (`checkpoint.weights_state`) with these weights in it."""
        copies = {id(p): copy for p, copy in zip(self._parameters, self._copies, strict=True)}

        def placed(base: Any) -> Any:
            # Megatron's sharded objects differ: not all have data, and a factory has no dtype.
            copy = copies.get(id(getattr(base, "data", None)))
            if copy is None:
                return base
            return replace(base, data=copy, **({"dtype": copy.dtype} if hasattr(base, "dtype") else {}))

        state: dict[str, Any] = dict_list_map_outplace(placed, weights)
        return state

    @torch.no_grad()
    def restore(self, weights: dict[str, Any], loaded: dict[str, Any]) -> None:
        """Take the weights `loaded` for `sharded(weights)`.

        The model must have them already, rounded to its dtype. A moving average gets the loaded fp32 values.
        """
        self._capture()
        index = {id(p): i for i, p in enumerate(self._parameters)}
        for chunk, state in weights.items():
            for key, base in state.items():
                if (i := index.get(id(getattr(base, "data", None)))) is not None:
                    self._copies[i].copy_(loaded[chunk][key])

    @torch.no_grad()
    def update_average(self) -> None:
        """Move the average: copy <- decay * copy + (1 - decay) * weight. Fixed weights stay unchanged."""
        if self._decay is None:
            return
        self._finish_background_work()
        self._finish_param_gather()
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            moved = copy.to(parameter.device, non_blocking=True)  # the device computes the average
            copy.copy_(moved.lerp_(parameter.detach().float(), 1.0 - self._decay), non_blocking=True)
        _wait()

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model has these weights; at its end the model gets its own again."""
        if not self._own and self._decay is not None:
            self._own = [host_like(p, p.dtype) for p in self._parameters]
        # Fixed weights have the model's dtype, so its own weights can stay in their place meanwhile.
        own, back = (self._copies, self._copies) if self._decay is None else (self._own, None)
        self._swap(self._copies, own)
        try:
            yield
        finally:
            self._swap(own, back)

    @torch.no_grad()
    def _swap(self, new: list[Tensor], old: list[Tensor] | None) -> None:
        """Copy `new` into the model, and the model's present weights to `old`, which may be the same list."""
        self._finish_background_work()
        self._finish_param_gather()
        for i, parameter in enumerate(self._parameters):
            present = None if old is None else parameter.detach().clone()
            parameter.copy_(new[i], non_blocking=True)
            if old is not None and present is not None:
                old[i].copy_(present, non_blocking=True)
        _wait()


def host_like(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty host tensor of this shape; with CUDA it is pinned, for several times faster copies."""
    return torch.empty(like.shape, dtype=dtype, pin_memory=torch.cuda.is_available())


def _wait() -> None:
    """Wait until the copies on the host are complete."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
