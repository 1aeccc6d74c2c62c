"""CPU tensors over the memory of `cuda` tensors: the null CUDA's device memory is memory of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_CPU = torch.device("cpu")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the memory, offset, shape, strides and dtype of `tensor`; both see what is written.

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
    if torch._C._len_torch_dispatch_stack() == 0:  # within a mode's own code, and so for most operations
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

    The plain kinds are taken apart here, which is several times as fast as PyTorch's own `tree_map`.
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
