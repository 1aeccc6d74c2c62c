"""Activations of chosen modules that wait in host memory for the backward pass: one pass's lifetime of it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from megatron.core.utils import get_model_config


@contextlib.contextmanager
def offloaded_activations(chunks: list[Any], forward_only: bool) -> Iterator[None]:
    """Around a pass through the schedule; does nothing where `parallel.offload_modules` is empty.

    Megatron (0.19.2) plans by the first pass: for its number of micro-batches, in the order of their backward
    passes, with pinned buffers for every shape that it ever met, which it keeps. Ours differ from update to
    update, and scoring has no backward pass at all. So every training pass is a first one, and none leaves
    anything but what PyTorch's allocator of pinned memory uses again.
    """
    configs = [get_model_config(chunk) for chunk in chunks]
    if not configs[0].offload_modules:
        yield
        return
    for config in configs:
        config.fine_grained_activation_offloading = not forward_only
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # after a first pass, Megatron prints a table
            yield
    finally:
        if not forward_only:
            Offloading.reset_instance()
