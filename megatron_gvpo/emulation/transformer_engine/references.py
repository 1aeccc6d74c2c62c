"""The references by the names of the compiled functions that they stand for.

The compiled function runs first: its C++ checks the arguments, converts quantizers and allocates the results,
while the null CUDA leaves the kernels out. Then the reference computes the values and writes them into that
memory. So a reference takes the compiled function's result, then its arguments. Kernels compute in fp32:
`read` gives a tensor's values in it, and `fill` rounds them to the tensor's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Reference = Callable[..., None]
TABLE: dict[str, Reference] = {}


def reference(function: Reference) -> Reference:
    """Register a reference under its name, which is the compiled function's."""
    TABLE[function.__name__] = function
    return function


def reference_of(name: str, function: Reference) -> None:
    """Register a reference of a family of functions under one name."""
    TABLE[name] = function


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in fp32, on the CPU; for fp32 a view of its memory.

    Raises ValueError for a tensor with gaps: the kernels that use this read their operands without strides.
    """
    if not tensor.is_contiguous():
        shape, strides = list(tensor.shape), list(tensor.stride())
        raise ValueError(f"the kernel reads a contiguous tensor, and gets {shape} with strides {strides}")
    return alias(tensor).float()


def read_strided(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in fp32, for kernels that know strides."""
    return alias(tensor).float()


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values, rounded to the tensor's dtype. Raises ValueError for another shape."""
    if tensor.shape != values.shape:
        raise ValueError(
            f"the compiled function made {list(tensor.shape)}, the reference {list(values.shape)}"
        )
    alias(tensor).copy_(values)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, last], as kernels see a tensor: all but its last size become one."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def is_plain(tensor: Any) -> bool:
    """A tensor with its own memory, as opposed to quantized data with scales."""
    return isinstance(tensor, torch.Tensor) and not hasattr(tensor, "_quantizer")
