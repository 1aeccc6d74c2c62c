"""Lets Megatron's host-and-device optimizer (HybridDeviceOptimizer) run where both are the same memory.

The optimizer asks every weight if it is on the GPU, and copies the weights that it updates on the host by
`Tensor.cpu()`. Here every tensor claims to be on the GPU, except those copies and tensors made from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class HostCopies(TorchFunctionMode):
    """Enter this context to build the optimizer, inside `cuda_means_cpu`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        on_host = bool(args) and getattr(args[0], "_on_host", False)  # only the copies made below have it
        if func == _IS_CUDA:
            return not on_host
        if func is torch.Tensor.pin_memory:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and (on_host or func is torch.Tensor.cpu):
            out._on_host = True  # type: ignore[attr-defined]
        return out
