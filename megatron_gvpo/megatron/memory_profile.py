"""Measures a rank's memory by part in one update: weights, gradients, optimizer, activations, the head.

Weights, gradients and optimizer are the exact sizes of their storages; the optimizer's states in host memory
are a part of their own. Activations and head are peaks above the level at the update's start. On a GPU,
PyTorch's allocator gives the peak. A CPU's allocator does not, so there every operation's outputs are tracked
until they are freed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_gvpo.core.collectives import all_gather_msgpack
from megatron_gvpo.megatron.device_memory import storages
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.optimizer import Optimizer

GIB = 2**30


class Meter(Protocol):
    """Bytes above the level at its start: `level` is the present value, `peak` the most since `restart`."""

    @property
    def level(self) -> int: ...

    @property
    def peak(self) -> int: ...

    def restart(self) -> None: ...


class _GPU:
    def __init__(self) -> None:
        self._start = torch.cuda.memory_allocated()
        self.restart()

    @property
    def level(self) -> int:
        return torch.cuda.memory_allocated() - self._start

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._start

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()


class _CPU(TorchDispatchMode):
    """Counts the storages of all operations' outputs while they live, except those of `excluded` tensors."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        super().__init__()
        self._level = self._peak = 0
        self._alive = {storage.data_ptr() for storage in storages(excluded).values()}

    @property
    def level(self) -> int:
        return self._level

    @property
    def peak(self) -> int:
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._alive:
            return
        self._alive.add(address)
        self._level += size
        self._peak = max(self._peak, self._level)
        weakref.finalize(storage, self._freed, address, size)

    def _freed(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self._level -= size

    def restart(self) -> None:
        self._peak = self._level


class MemoryProfile:
    """Context for the forward and backward passes of one update; call `parts` or `metrics` afterwards."""

    def __init__(self, *trained: tuple[Model, Optimizer]) -> None:
        weights = [tensor for model, _ in trained for tensor in model.weights()]
        gradients = [tensor for model, _ in trained for tensor in model.gradient_buffers()]
        states = [tensor for _, optimizer in trained for tensor in optimizer.tensors()]
        parts = {
            "weights": storages(weights),
            "gradients": storages(gradients),
            "optimizer": storages(states),
        }
        # In fp32 the optimizer's master weights are the same tensors as the model's weights.
        parts["optimizer"] = {a: s for a, s in parts["optimizer"].items() if a not in parts["weights"]}
        self._bytes = {name: sum(s.nbytes() for s in part.values()) for name, part in parts.items()}
        self._host_bytes = sum(optimizer.host_bytes for _, optimizer in trained)
        self._permanent = [*weights, *gradients, *states, *(t for _, o in trained for t in o.host_tensors())]
        self._outside = self._head = self._entry = self._inside = 0
        self._meter: Meter | None = None

    def __enter__(self) -> Self:
        self._modes = contextlib.ExitStack()
        if torch.cuda.is_available():
            self._meter = _GPU()
        else:
            self._meter = self._modes.enter_context(_CPU(self._permanent))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()
        assert self._meter is not None
        self._outside = max(self._outside, self._meter.peak)
        self._meter = None

    def enter_head(self, _: Tensor | None = None) -> None:
        """Note that the head begins; also used as a hook on the gradient that arrives at the head."""
        if self._meter is not None:
            self._outside = max(self._outside, self._meter.peak)
            self._entry = self._meter.level
            self._meter.restart()

    def leave_head(self, _: Tensor | None = None) -> None:
        """Note that the head ends; also used as a hook on the gradient that leaves the head."""
        if self._meter is not None:
            self._head = max(self._head, self._meter.peak - self._entry)
            self._inside = max(self._inside, self._meter.peak)
            self._meter.restart()

    def parts(self) -> dict[str, int]:
        """Return this rank's bytes by part.

        "activations" is the peak outside the head, above weights, gradients and optimizer. "head" is the
        head's own peak, above the level at its start. "peak" is the peak of all. Activations and head need
        not reach their peaks together, so "peak" may be less than the sum. "host_optimizer" is not in it.
        """
        highest = max(self._outside, self._inside)
        measured = {"activations": self._outside, "head": self._head}
        host = {"host_optimizer": self._host_bytes} if self._host_bytes else {}
        return {**self._bytes, **measured, "peak": sum(self._bytes.values()) + highest, **host}

    def metrics(self) -> dict[str, float]:
        """Return memory/<part>_gib of the rank with the highest peak. A collective."""
        fullest = max(all_gather_msgpack(self.parts()), key=lambda parts: parts["peak"])
        return {f"memory/{name}_gib": size / GIB for name, size in fullest.items()}
