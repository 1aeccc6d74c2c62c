"""Makes a process one that computes on emulated GPUs: `environment` before it starts, `install` in it.

Nothing here loads torch before `install`: the command starts itself again with the environment.
"""

from __future__ import annotations

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.rehearsal.nullcuda import counters
from megatron_gvpo.rehearsal.nullcuda.devices import Device
from megatron_gvpo.rehearsal.process import environment_of_ranks

_EVERY_SIZE = 2**62


def environment(device: Device, count: int, usable: int) -> dict[str, str]:
    """Variables of a process with `count` emulated devices, each with `usable` bytes for tensors.

    They are those of a rehearsed rank, with copies of every size.

    Raises ConfigError if something is missing on this machine.
    """
    return environment_of_ranks(device, count, usable) | {
        "NULLCUDA_COPY": str(_EVERY_SIZE),
        "NULLCUDA_KERNELS": "refuse",
        "TORCHDYNAMO_DISABLE": "1",  # compiled code launches kernels of its own
        "TRITON_INTERPRET": "1",
    }


def install() -> None:
    """Compute operations, Transformer Engine's kernels and collectives of `cuda` tensors on the host.

    To be called before megatron-core is imported. Raises ConfigError in a process without the null CUDA.
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
    # A fork shares no device: its memory is its own. PyTorch does not ask further where CUDA is initialised.
    torch.cuda.init()
    torch.cuda._is_in_bad_fork = lambda: False
