"""Prepares a process for emulated GPUs: it starts with the variables of `environment` and calls `install`.

This module loads torch only in `install`, because the command first starts itself again with these variables.
"""

from __future__ import annotations

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.rehearsal.nullcuda import counters
from megatron_gvpo.rehearsal.nullcuda.devices import Device
from megatron_gvpo.rehearsal.process import environment_of_ranks

_EVERY_SIZE = 2**62


def environment(device: Device, count: int, usable: int) -> dict[str, str]:
    """Return the environment variables of a process with `count` emulated GPUs of `usable` bytes each.

    They are the variables of a rehearsed rank, except that the null CUDA really copies bytes, however many.

    Raises ConfigError if this machine lacks something that they need.
    """
    return environment_of_ranks(device, count, usable) | {
        "NULLCUDA_COPY": str(_EVERY_SIZE),
        "NULLCUDA_KERNELS": "refuse",
        "TORCHDYNAMO_DISABLE": "1",  # compiled code launches kernels of its own
        "TRITON_INTERPRET": "1",
    }


def install() -> None:
    """Compute the operations, Transformer Engine's kernels and the collectives of `cuda` tensors on the host.

    Call it before megatron-core is imported. Raises ConfigError in a process without the null CUDA.
    """
    if not counters.is_loaded():
        raise ConfigError(
            "the emulated GPU needs the null CUDA: start the process with `emulated_gpu.environment`"
        )
    import torch

    from megatron_gvpo.emulation import collectives, mode, triton_kernels
    from megatron_gvpo.emulation.transformer_engine.install import install as install_transformer_engine

    collectives.install()
    mode.install()
    install_transformer_engine()
    triton_kernels.install()
    # PyTorch forbids CUDA in a forked process. Here a fork is harmless, because its memory is its own.
    torch.cuda.init()
    torch.cuda._is_in_bad_fork = lambda: False
