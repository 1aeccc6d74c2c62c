"""Applies patches of weights, for the plugins in both engines: single elements, or whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def apply_patches(model: Any, wire: torch.Tensor, patches: list[list[Any]]) -> None:
    """Write the patches into the model through its own checkpoint loader, which handles fusion and shards."""
    with KeepWhereNaN():
        model.load_weights(unpack(wire, patches))


def check_patched(model: Any) -> None:
    """Raise RuntimeError if a loader wrote elements that no patch names. Called at the end of a push."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and torch.isnan(parameter).any():
            raise RuntimeError(f"a weight patch left NaN in {name}: its loader does not copy in place")


def refuse_rearranged_experts(model: Any) -> None:
    """Raise RuntimeError if vLLM rearranges the experts after loading: a patch would change other elements.

    Only the Triton kernels keep the order of the checkpoint. FlashInfer's, which Blackwell prefers, swap or
    permute them.
    """
    for name, layer in model.named_modules():
        backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
        if backend is not None and backend.name not in ("TRITON", "BATCHED_TRITON"):
            raise RuntimeError(
                f"rollout.weights.transport=delta cannot patch {name}: vLLM's backend of its experts is "
                f"{backend.name}, which rearranges their weights. Start vLLM with --moe-backend triton, or "
                "use transport=broadcast"
            )


def unpack(wire: torch.Tensor, patches: list[list[Any]]) -> list[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each patch [name, dtype, shape, count]; NaN marks unchanged elements.

    `wire`, uint8, holds the int32 positions of all patches, then their values. Count -1 is a whole tensor,
    which has no positions.
    """
    counts = [count for _, _, _, count in patches]
    cut = 4 * sum(count for count in counts if count > 0)
    positions, values = wire[:cut].view(torch.int32), wire[cut:]
    tensors = []
    for name, dtype_name, shape, count in patches:
        dtype = getattr(torch, dtype_name)
        numel = torch.Size(shape).numel()
        size = (numel if count < 0 else count) * dtype.itemsize
        value, values = values[:size], values[size:]
        if value.storage_offset() % dtype.itemsize:  # an element would lie between two addresses
            value = value.clone()
        value = value.view(dtype)
        if count < 0:
            tensors.append((name, value.view(shape)))
            continue
        position, positions = positions[:count], positions[count:]
        tensor = torch.full((numel,), torch.nan, dtype=dtype, device=wire.device)
        tensor[position.long()] = value
        tensors.append((name, tensor.view(shape)))
    return tensors


class KeepWhereNaN(TorchFunctionMode):
    """Context in which a copy into a tensor keeps the tensor's elements where the source is NaN.

    Loaders write `target.copy_(source)`, or `target[index] = source`, as those of convolutions do.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.copy_ and args[1].is_floating_point():
            return func(args[0], _merged(args[0], args[1]))
        if func is torch.Tensor.__setitem__ and isinstance(args[2], torch.Tensor):
            return func(args[0], args[1], _merged(args[0][args[1]], args[2]))
        return func(*args, **(kwargs or {}))


def _merged(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The source in the target's dtype, with the target's elements where it is NaN."""
    source = source.to(target)
    return torch.where(torch.isnan(source), target, source)
