"""Offloads the policy's device memory to the host while a rollout engine on the same GPUs generates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.optimizer import Optimizer

Part = Literal["weights", "training"]


class DeviceMemory:
    """Frees and restores two parts of this rank's models: "weights" and "training" (optimizer, gradients).

    Weights and optimizer states are kept on the host. Gradients are not kept, because they are zero between
    updates. Optimizer states that are on the host anyway stay there. While "weights" is released, the model
    cannot score or be exported. While "training" is released, it cannot be updated or saved.
    """

    def __init__(self, *models: tuple[Model, Optimizer | None], is_constant: bool = False) -> None:
        """`is_constant`: the weights never change, so their first copy on the host stays right."""
        self._models = [model for model, _ in models]
        self._trained = [(model, optimizer) for model, optimizer in models if optimizer is not None]
        self._is_constant = is_constant
        self._released: dict[Part, list[_Released]] = {}
        # Host buffers by part and index, pinned if there is CUDA. They are kept, because pinning is slow.
        self._host: dict[tuple[Part, int], Tensor] = {}
        self._ahead: list[_Released] | None = None  # the weights, if their copies were begun
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def copy_weights_ahead(self) -> None:
        """Begin to copy the weights to the host, beside work that only reads them, such as a push.

        Every rank must call it.
        The next `release("weights")` waits for these copies and makes no others; `restore("weights")` forgets
        them, because the weights may change then.
        """
        if "weights" not in self._released:
            self._finish_background_work()
            self._gather_weights()
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._ahead = self._copies("weights", self._weights())

    def release(self, part: Part) -> None:
        """Offload a part and free its device memory; does nothing if the part is released already.

        Every rank must release the weights.
        """
        if part in self._released:
            return
        self._finish_background_work()
        weights = self._weights()
        if part == "weights":
            for model in self._models:
                model.drop_fp8_copies()
            if self._ahead is None:
                self._gather_weights()
                self._ahead = self._copies(part, weights)
            released, self._ahead = self._ahead, None
        else:  # in fp32 the model's weights are themselves the master weights
            states = storages(s for _, optimizer in self._trained for s in optimizer.tensors())
            released = self._copies(part, {a: s for a, s in states.items() if a not in weights})
            gradients = storages(g for model, _ in self._trained for g in model.gradient_buffers())
            released += [_Released(storage, None) for storage in gradients.values()]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # once for all copies
        for each in released:
            each.storage.resize_(0)
        self._released[part] = released
        torch.cuda.empty_cache()

    def restore(self, part: Part) -> None:
        """Bring a part back to the device; does nothing if the part was not released."""
        if part == "weights":
            self._ahead = None
        for each in self._released.pop(part, []):
            each.storage.resize_(each.nbytes)
            content = _bytes(each.storage)
            if each.host is None:
                content.zero_()
            else:
                content.copy_(each.host, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _finish_background_work(self) -> None:
        for model in self._models:
            model.finish_background_work()

    def _gather_weights(self) -> None:
        """Gather what an update with overlap_param_gather leaves for the next reader of the weights.

        Copies of weights that are not gathered would come back after the gather of a later reader, such as a
        push, and nothing would gather them again.
        """
        for model in self._models:
            model.finish_param_gather()

    def _weights(self) -> dict[int, torch.UntypedStorage]:
        return storages(weight for model in self._models for weight in model.weights())

    def _copies(self, part: Part, offloaded: dict[int, torch.UntypedStorage]) -> list[_Released]:
        """Begin to copy the storages to the host."""
        return [_Released(s, self._copy(s, (part, i))) for i, s in enumerate(offloaded.values())]

    def _copy(self, storage: torch.UntypedStorage, key: tuple[Part, int]) -> Tensor:
        """Begin to copy a storage's bytes to a host buffer, which is reused."""
        host = self._host.get(key)
        is_new = host is None or len(host) != storage.nbytes()
        if host is None or is_new:
            pin = torch.cuda.is_available()
            host = self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        if is_new or not self._is_constant:
            host.copy_(_bytes(storage), non_blocking=True)
        return host


class _Released:
    """A storage without memory, its size in bytes, and its content on the host (None: zeros)."""

    def __init__(self, storage: torch.UntypedStorage, host: Tensor | None) -> None:
        self.storage, self.host, self.nbytes = storage, host, storage.nbytes()


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the distinct storages of the tensors, by address; of a quantized tensor those of its parts."""
    owned = (part.untyped_storage() for tensor in tensors for part in _parts(tensor))
    return {storage.data_ptr(): storage for storage in owned if storage.nbytes()}


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the memory of a tensor.

    Transformer Engine's quantized tensors, such as Float8Tensor, have no storage of their own. Their parts,
    which PyTorch's protocol for such classes names, are the data, its transposed copy if there is one, and
    scales.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
