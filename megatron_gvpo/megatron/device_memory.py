"""The policy's device memory, lent to a rollout engine on the same GPUs while it generates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from megatron_gvpo.megatron.model.build import Model
from megatron_gvpo.megatron.optimizer import Optimizer

Part = Literal["weights", "training"]


class Memory:
    """Frees and restores "weights", and "training": optimizer states and gradients. Of this rank's models.

    What is freed is kept on the host, but for the gradients: they are zero between updates. Optimizer states
    that are on the host anyway stay there. While the weights are freed the model can neither score nor be
    exported; while "training" is, it cannot be updated or saved.
    """

    def __init__(self, *models: tuple[Model, Optimizer | None]) -> None:
        self._models = [model for model, _ in models]
        self._trained = [(model, optimizer) for model, optimizer in models if optimizer is not None]
        self._freed: dict[Part, list[_Freed]] = {}
        # Pinned where there is CUDA, and kept, because pinning is slow; by part and place in it.
        self._host: dict[tuple[Part, int], Tensor] = {}

    def release(self, part: Part) -> None:
        """Give the device's memory back; nothing where that was done."""
        if part in self._freed:
            return
        for model in self._models:
            model.about_to_change()
        weights = storages(w for model in self._models for w in model.weights())
        gradients = storages(g for model, _ in self._trained for g in model.gradient_buffers())
        kept = weights
        if part == "training":  # in fp32 the optimizer's weights are the model's own
            states = storages(s for _, optimizer in self._trained for s in optimizer.tensors())
            kept = {place: storage for place, storage in states.items() if place not in weights}
        freed = [_Freed(s, self._copy(s, (part, i))) for i, s in enumerate(kept.values())]
        if part == "training":
            freed += [_Freed(storage, None) for storage in gradients.values()]
        for each in freed:
            each.storage.resize_(0)
        self._freed[part] = freed
        torch.cuda.empty_cache()

    def restore(self, part: Part) -> None:
        """Take the memory again, with what was in it; nothing where it was not released."""
        for each in self._freed.pop(part, []):
            each.storage.resize_(each.nbytes)
            whole = _bytes(each.storage)
            if each.host is None:
                whole.zero_()
            else:
                whole.copy_(each.host, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _copy(self, storage: torch.UntypedStorage, key: tuple[Part, int]) -> Tensor:
        """The bytes of a storage on the host, in a buffer that is used again."""
        host = self._host.get(key)
        if host is None or len(host) != storage.nbytes():
            pin = torch.cuda.is_available()
            host = self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        host.copy_(_bytes(storage))
        return host


class _Freed:
    """A storage without memory, its size, and what is to be in it again."""

    def __init__(self, storage: torch.UntypedStorage, host: Tensor | None) -> None:
        self.storage, self.host, self.nbytes = storage, host, storage.nbytes()


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The distinct storages behind them, by address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
