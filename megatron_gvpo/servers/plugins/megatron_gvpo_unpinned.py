"""Lets SGLang serve adapters on a machine without an accelerator: there host memory is not pinned.

SGLang (0.5.23) asks torch for pinned memory wherever it copies an adapter, also for its CPU kernels
(`--lora-backend torch_native`), and a torch without an accelerator refuses that. Pinning changes how fast
memory is copied, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def leave_unpinned() -> None:
    """From here on this process ignores requests to pin memory, if it has no accelerator to pin it for."""
    if torch.accelerator.is_available():
        return
    for name in ("tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010 - torch's is of another type


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return make(*arguments, **named)

    return made
