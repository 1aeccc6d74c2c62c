"""Values of small integer tensors on the null CUDA, for functions whose sizes depend on them.

Vision towers and gated delta nets read image grids, tokens and lengths from the device. Kernels do not run
there, so `with_integers` computes, inside one function, the integers and booleans that come from integers
and booleans. Its backward pass and all other functions run as on every rehearsed rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_gvpo.rehearsal.nullcuda.aliases import (
    alias,
    aliases,
    computed_first,
    has_mask,
    is_mask,
    overwrite,
    tensors_of,
)

# The CUDA code of these operations reads a size from the device, which no kernel has written there.
_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique", "unique", "repeat_interleave", "equal", "isin")


def with_integers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function, so that integer tensors on the device have real values inside it."""

    @functools.wraps(function)
    def computed(*args: Any, **options: Any) -> Any:
        with Masks(), Integers():
            return function(*args, **options)

    return computed


def without_integers(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to be called by one `with_integers`, which runs as on every rehearsed rank.

    PyTorch's compiler, for one, leaves functions alone that run within a mode.
    """

    @functools.wraps(function)
    def plain(*args: Any, **options: Any) -> Any:
        with _no_function_modes(), _disable_current_modes():
            return function(*args, **options)

    return plain


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


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


class Masks(TorchFunctionMode):
    """Replaces the masks of fractions by as many indices as they have, before autograd records them.

    So the backward pass, which no mode sees, finds sizes that do not depend on the device. The indices
    themselves are arbitrary values.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and _is_on_device(args[0]):
            args = (args[0], _by_indices(args[1]), *args[2:])
        elif func is torch.Tensor.masked_scatter and _is_on_device(args[0]):
            return _MaskedScatter.apply(*args)
        return func(*args, **kwargs)


class _MaskedScatter(torch.autograd.Function):
    """`masked_scatter`, whose backward pass allocates as CUDA's does: an index for each dimension."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.count, ctx.shape = own.dim(), source.shape
        return own.masked_scatter(mask, source)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        [grad], (mask,) = grads, ctx.saved_tensors
        torch.empty(ctx.count * ctx.shape.numel(), dtype=torch.int64, device=grad.device)
        return grad.masked_fill(mask, 0), None, grad.new_empty(ctx.shape)


def _by_indices(key: Any) -> Any:
    """An indexing key with a tensor of indices for every dimension of each mask."""
    if isinstance(key, torch.Tensor) and is_mask(key):
        count = int(alias(key).sum())
        return tuple(torch.empty(count, dtype=torch.int64, device=key.device) for _ in range(key.dim()))
    if isinstance(key, tuple) and any(isinstance(part, torch.Tensor) and is_mask(part) for part in key):
        parts = [_by_indices(part) for part in key]
        return tuple(one for part in parts for one in (part if isinstance(part, tuple) else (part,)))
    return key


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


def _is_on_device(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_cuda and _has_fractions(tensor)
