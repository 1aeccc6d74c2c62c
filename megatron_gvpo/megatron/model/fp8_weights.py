"""Weights that are kept in FP8 (`model.fp8.weights`): plain ones in their place where they must be exact."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch.nn import Parameter


@contextlib.contextmanager
def plain_weights(chunks: list[Any]) -> Iterator[list[tuple[Parameter, Parameter]]]:
    """Context in which the modules have a plain parameter of zeros in place of each one in FP8.

    Its value has pairs of the two; the plain ones have the others' attributes, such as `main_grad`.
    """
    in_fp8 = [
        (module, name, weight)
        for chunk in chunks
        for module in chunk.modules()
        for name, weight in module.named_parameters(recurse=False)
        if is_float8tensor(weight)
    ]
    pairs = []
    for module, name, weight in in_fp8:
        plain = Parameter(torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device))
        vars(plain).update({key: value for key, value in vars(weight).items() if not key.startswith("_")})
        pairs.append((weight, plain))
        module._parameters[name] = plain
    try:
        yield pairs
    finally:
        for module, name, weight in in_fp8:
            module._parameters[name] = weight


@contextlib.contextmanager
def loaded_in_full_precision(chunks: list[Any]) -> Iterator[None]:
    """Context in which weights are loaded that are then kept in FP8, and exact in the optimizer.

    Megatron's optimizer takes its own copies of such weights from what Transformer Engine remembers of their
    initialization, at random. Without this the first update would make these random numbers the weights.
    """
    with plain_weights(chunks) as pairs:
        yield
    with torch.no_grad():
        for weight, plain in pairs:
            weight.copy_(plain)
            if hasattr(weight, "get_high_precision_init_val"):
                weight.get_high_precision_init_val().copy_(plain)
