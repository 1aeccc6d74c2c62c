"""Registers PyTorch's FlashAttention operators, which only GPUs have, for CPU tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_gvpo.emulation.flash_attention import backward, forward


@functools.cache
def install() -> Any:
    """Register the operators for this process; the returned library keeps them."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library
