"""The table of references: CPU functions that compute the results of Transformer Engine's compiled functions.

The compiled function runs first: its C++ code checks the arguments, converts quantizers and allocates the
results, while the null CUDA skips the kernels. Then the reference computes the values and writes them into
these results. So a reference takes the compiled function's result, then its arguments. Kernels compute in
fp32: `read` returns a tensor's values in fp32, and `fill` rounds values to the tensor's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Reference = Callable[..., None]
TABLE: dict[str, Reference] = {}


def reference(function: Reference) -> Reference:
    """Decorator: register a reference under its own name, which is also the compiled function's name."""
    TABLE[function.__name__] = function
    return function


def reference_of(name: str, function: Reference) -> None:
    """Register a reference under the name of a compiled function."""
    TABLE[name] = function


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values in fp32 on the CPU; for an fp32 tensor, a view of its memory.

    Raises ValueError if the tensor is not contiguous, because the kernel would ignore its strides.
    """
    if not tensor.is_contiguous():
        shape, strides = list(tensor.shape), list(tensor.stride())
        raise ValueError(f"the kernel reads a contiguous tensor, and gets {shape} with strides {strides}")
    return alias(tensor).float()


def read_strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values in fp32, for kernels that use strides."""
    return alias(tensor).float()


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values, rounded to the tensor's dtype. Raises ValueError if the shapes differ."""
    if tensor.shape != values.shape:
        raise ValueError(
            f"the compiled function made {list(tensor.shape)}, the reference {list(values.shape)}"
        )
    alias(tensor).copy_(values)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """Flatten all dimensions but the last, as kernels do: [rows, last]."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def is_plain(tensor: Any) -> bool:
    """True for an ordinary tensor, false for quantized data with scales."""
    return isinstance(tensor, torch.Tensor) and not hasattr(tensor, "_quantizer")
