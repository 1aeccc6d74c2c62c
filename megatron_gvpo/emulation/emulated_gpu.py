"""Makes this process one that computes on emulated GPUs; `process.environment` has the variables it needs."""

from __future__ import annotations

import torch

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.emulation import collectives, mode, triton_kernels
from megatron_gvpo.rehearsal.nullcuda import counters


def install() -> None:
    """Compute operations, Transformer Engine's kernels and collectives of `cuda` tensors on the host.

    To be called before megatron-core is imported. Raises ConfigError in a process without the null CUDA.
    """
    if not counters.is_loaded():
        raise ConfigError(
            "the emulated GPU needs the null CUDA: start the process with `process.environment`"
        )
    from megatron_gvpo.emulation.transformer_engine.install import install as install_transformer_engine

    collectives.install()
    mode.install()
    install_transformer_engine()
    triton_kernels.install()
    # A fork shares no device: its memory is its own. PyTorch does not ask further where CUDA is initialised.
    torch.cuda.init()
    torch.cuda._is_in_bad_fork = lambda: False
