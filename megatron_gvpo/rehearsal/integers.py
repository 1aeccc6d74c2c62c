"""Values of small integer tensors on the null CUDA, for functions whose sizes depend on them.

Gated delta nets read the lengths of sequences from the device. Kernels do not run there, so `with_integers`
computes, inside one function, the integers and booleans that come from integers and booleans. All other
functions run as on every rehearsed rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_gvpo.rehearsal.nullcuda.aliases import (
    aliases,
    computed_first,
    has_mask,
    overwrite,
    tensors_of,
)

# The CUDA code of these operations reads a size from the device, which no kernel has written there.
_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique", "unique", "repeat_interleave", "equal", "isin")


def with_integers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function, so that integer tensors on the device have real values inside it."""

    @functools.wraps(function)
    def computed(*args: Any, **options: Any) -> Any:
        with Integers():
            return function(*args, **options)

    return computed


class Integers(TorchDispatchMode):
    """Computes operations whose tensors are all integers or booleans, on the CPU and in the same memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_of(args), *tensors_of(kwargs)]
        device = kwargs.get("device")
        is_made_there = device is not None and torch.device(device).type == "cuda"
        if not (is_made_there or any(t.is_cuda for t in tensors)) or func.is_view:
            return func(*args, **kwargs)
        if any(_has_fractions(t) for t in tensors) or func.namespace != "aten":
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(_SIZED_BY_VALUES) or (name.startswith(("index", "_index")) and has_mask(args)):
            if not _knows_size(name, args, kwargs):
                # CUDA's own code also waits here; this wait is counted.
                torch.cuda.current_stream().synchronize()
            return computed_first(_compute, func, args, kwargs)
        made = func(*args, **kwargs)  # allocates the result, and counts a launch
        outs = [out for out in tree_leaves(made) if isinstance(out, torch.Tensor)]
        if outs and not any(map(_has_fractions, outs)) and "empty" not in name:
            _write(outs, _compute(func, args, kwargs))
        return made


def _knows_size(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if CUDA's code (PyTorch 2.13) does not read the values on which the result's size depends."""
    if name == "equal":  # compares a tensor of integers with itself
        return args[0] is args[1]
    return name == "repeat_interleave" and kwargs.get("output_size") is not None


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(
        *aliases(args), **{key: value for key, value in aliases(kwargs).items() if key != "pin_memory"}
    )


def _write(outs: list[torch.Tensor], computed: Any) -> None:
    """Write the computed values into the memory that CUDA's code allocated for the result."""
    results = [result for result in tree_leaves(computed) if isinstance(result, torch.Tensor)]
    for out, result in zip(outs, results, strict=True):
        overwrite(out, result)


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
