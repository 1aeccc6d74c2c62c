"""CPU tensors over the memory of `cuda` tensors, and results of the CPU in that memory.

The null CUDA's device memory is memory of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

_CPU = torch.device("cpu")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the memory, offset, shape, strides and dtype of `tensor`.

    A write to one changes both.

    It has no part in autograd, and cannot be resized. It does not keep the memory: use it while `tensor`
    lives. A tensor that is on the CPU already is returned without its part in autograd.
    Raises TypeError for a lazily conjugated or negated tensor, and for a tensor without memory of its own,
    such as a subclass that holds other tensors.
    """
    if tensor.device.type == "cpu":
        return tensor.detach()
    if tensor.device.type != "cuda" or tensor.is_conj() or tensor.is_neg():
        raise TypeError(f"no memory to compute on: a tensor of {tensor.dtype} on {tensor.device}")
    storage = tensor.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    if size and not address:
        raise TypeError(f"a {type(tensor).__name__} without memory of its own")
    # true within a mode's own code, which makes most of the calls
    if torch._C._len_torch_dispatch_stack() == 0:
        return _over(tensor, address, size)
    with _disable_current_modes():
        return _over(tensor, address, size)


@torch.no_grad()
def _over(tensor: torch.Tensor, address: int, size: int) -> torch.Tensor:
    if not size:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory: Any = torch._C._construct_storage_from_data_pointer(address, _CPU, size)
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


_ATOMS = (int, float, bool, str, type(None), torch.dtype)


def aliases(tree: Any) -> Any:
    """The tree of lists, tuples and dictionaries, with each `cuda` tensor's `alias`, and "cpu" for "cuda".

    Plain containers are handled here, which is several times as fast as PyTorch's own `tree_map`.
    """
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind is tuple or kind is list:
        return kind([aliases(part) for part in tree])
    if kind is dict:
        return {key: aliases(value) for key, value in tree.items()}
    if isinstance(tree, torch.Tensor):
        return _on_host(tree)
    return tree_map(_on_host, tree)


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of lists, tuples and dictionaries, in order."""
    kind = type(tree)
    if kind in _ATOMS:
        return
    if kind is tuple or kind is list:
        for part in tree:
            yield from tensors_of(part)
    elif kind is dict:
        for part in tree.values():
            yield from tensors_of(part)
    else:
        yield from (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
        return alias(leaf)
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return _CPU
    return leaf


def overwrite(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write a CPU tensor's values into the memory of `target`, unless they were computed there."""
    memory = alias(target)
    if memory.data_ptr() != values.data_ptr():
        memory.copy_(values)


def computed_first(
    compute: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The results of `compute(func, args, kwargs)`, made on the CPU, as tensors on the device.

    A result that is an argument which the operation changes is that argument. The device is that of the first
    argument on a device, or of the keywords.
    """
    tensors = [t for t in tensors_of((args, kwargs)) if t.is_cuda]
    by_address = {t.data_ptr(): t for t in tensors if t.numel()} if func._schema.is_mutable else {}
    device = tensors[0].device if tensors else torch.device(kwargs["device"])

    def on_device(result: torch.Tensor) -> torch.Tensor:
        if (own := by_address.get(result.data_ptr())) is not None:
            return own
        made = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
        overwrite(made, result)
        return made

    return tree_map_only(torch.Tensor, on_device, compute(func, args, kwargs))


def is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def has_mask(args: tuple[Any, ...]) -> bool:
    """True if the indices of an indexing operation, its second argument, have a mask."""
    return any(is_mask(t) for t in tensors_of(args[1:2]))
