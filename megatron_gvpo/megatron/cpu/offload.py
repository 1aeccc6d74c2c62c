"""Host and device told apart where both are the same memory, for Megatron's optimizer that works on both.

It asks every weight whether it is on the GPU, and copies those that it will update on the host by
`Tensor.cpu()`. Here every tensor is on the GPU, but for those copies and what is made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class HostCopies(TorchFunctionMode):
    """To be entered while the optimizer is built; inside `cuda_means_cpu`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        on_host = bool(args) and getattr(args[0], "_on_host", False)
        if func == _IS_CUDA:
            return not on_host
        if func is torch.Tensor.pin_memory:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and (on_host or func is torch.Tensor.cpu):
            out._on_host = True  # type: ignore[attr-defined]
        return out
