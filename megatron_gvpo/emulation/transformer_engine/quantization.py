"""FP8 tensors with their scales."""

from __future__ import annotations

from typing import Any

import torch

from megatron_gvpo.emulation.transformer_engine.memory import fill, is_plain, read, rows


def write(out: Any, values: torch.Tensor, quantizer: Any = None, dtype: torch.dtype | None = None) -> None:
    """Write fp32 values into a result: rounded to its dtype, or quantized by its quantizer."""
    if is_plain(out):
        fill(out, values)
        return
    raise NotImplementedError(type(out).__name__)


def operand(tensor: Any, is_rowwise: bool) -> torch.Tensor:
    """[rows, columns] in fp32: the copy of a product's operand that the hardware would read."""
    if is_plain(tensor):
        return rows(read(tensor))
    raise NotImplementedError(type(tensor).__name__)
