"""Where a rank's memory goes, measured in one update: what is always there, activations, the head.

Weights, gradients and optimizer are counted by their storages, exactly; what of the optimizer is in host
memory, apart. The rest is the highest level above where the update began: PyTorch's allocator tells it on a
GPU, and on a CPU, whose allocator keeps no account, every operation's outputs are followed until freed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_gvpo.megatron.device_memory import storages
from megatron_gvpo.megatron.model.build import Model
from megatron_gvpo.megatron.optimizer import Optimizer
from megatron_gvpo.runtime.collectives import all_gather_msgpack

GIB = 2**30


class Meter(Protocol):
    """Bytes above where it was started: now, and the most since `restart`."""

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
    """Counts the storages of all operations' outputs while they live, but for those of `known` tensors."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._level = self._peak = 0
        self._alive = {storage.data_ptr() for storage in storages(known).values()}

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
                self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if not size or place in self._alive:
            return
        self._alive.add(place)
        self._level += size
        self._peak = max(self._peak, self._level)
        weakref.finalize(storage, self._freed, place, size)

    def _freed(self, place: int, size: int) -> None:
        self._alive.discard(place)
        self._level -= size

    def restart(self) -> None:
        self._peak = self._level


class MemoryProfile:
    """A context for the forward and backward passes of one update; `parts` afterwards."""

    def __init__(self, *trained: tuple[Model, Optimizer]) -> None:
        weights = [tensor for model, _ in trained for tensor in model.weights()]
        gradients = [tensor for model, _ in trained for tensor in model.gradient_buffers()]
        states = [tensor for _, optimizer in trained for tensor in optimizer.tensors()]
        held = {
            "weights": storages(weights),
            "gradients": storages(gradients),
            "optimizer": storages(states),
        }
        # In fp32 the optimizer's masters are the weights.
        held["optimizer"] = {p: s for p, s in held["optimizer"].items() if p not in held["weights"]}
        self._bytes = {name: sum(s.nbytes() for s in of.values()) for name, of in held.items()}
        self._host_bytes = sum(optimizer.host_bytes for _, optimizer in trained)
        self._known = [*weights, *gradients, *states, *(t for _, o in trained for t in o.host_tensors())]
        self._outside = self._head = self._entry = self._inside = 0
        self._meter: Meter | None = None

    def __enter__(self) -> Self:
        self._modes = contextlib.ExitStack()
        if torch.cuda.is_available():
            self._meter = _GPU()
        else:
            self._meter = self._modes.enter_context(_CPU(self._known))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.close()
        assert self._meter is not None
        self._outside = max(self._outside, self._meter.peak)
        self._meter = None

    @contextlib.contextmanager
    def head(self) -> Iterator[None]:
        """What is in here is the head's."""
        self.enter_head()
        yield
        self.leave_head()

    def enter_head(self, _: Tensor | None = None) -> None:
        """Also a hook on the gradient that arrives at the head."""
        if self._meter is not None:
            self._outside = max(self._outside, self._meter.peak)
            self._entry = self._meter.level
            self._meter.restart()

    def leave_head(self, _: Tensor | None = None) -> None:
        """Also a hook on the gradient that leaves it."""
        if self._meter is not None:
            self._head = max(self._head, self._meter.peak - self._entry)
            self._inside = max(self._inside, self._meter.peak)
            self._meter.restart()

    def parts(self) -> dict[str, int]:
        """Bytes of this rank.

        "activations" is the highest level outside the head, above what is always there; "head" the head's own
        peak, above what was there when it began; "peak" the highest level of all. The first two need not
        coincide, so "peak" may be less than the sum. "host_optimizer" is no part of it.
        """
        highest = max(self._outside, self._inside)
        own = {"activations": self._outside, "head": self._head}
        host = {"host_optimizer": self._host_bytes} if self._host_bytes else {}
        return {**self._bytes, **own, "peak": sum(self._bytes.values()) + highest, **host}

    def metrics(self) -> dict[str, float]:
        """memory/<part>_gib of the rank with the highest peak. A collective."""
        fullest = max(all_gather_msgpack(self.parts()), key=lambda parts: parts["peak"])
        return {f"memory/{name}_gib": size / GIB for name, size in fullest.items()}
