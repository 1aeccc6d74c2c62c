"""Offloads the activations of chosen modules to host memory until the backward pass."""

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
    """Context for one pass through the schedule; does nothing if `parallel.offload_modules` is empty.

    Megatron (0.19.2) makes a plan in the first pass, for its number of micro-batches and the order of their
    backward passes, and keeps a pinned buffer for every shape. Here, micro-batches differ from update to
    update, and scoring has no backward pass. So every training pass starts a new plan, and leaves nothing but
    pinned memory that PyTorch's allocator reuses.
    """
    configs = [get_model_config(chunk) for chunk in chunks]
    if not configs[0].offload_modules:
        yield
        return
    for config in configs:
        config.fine_grained_activation_offloading = not forward_only
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints a table after a first pass
            yield
    finally:
        if not forward_only:
            Offloading.reset_instance()
