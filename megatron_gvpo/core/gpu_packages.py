"""The checks that this machine's GPUs can be used: their driver, torch and Transformer Engine."""

from __future__ import annotations

import ctypes
import os
import runpy
from importlib import util
from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.gpus import driver_cuda, driver_version, list_gpus
from megatron_gvpo.core.versions import COMPONENTS

HIDE = "or leave the GPUs unused: CUDA_VISIBLE_DEVICES="
REHEARSAL = "MEGATRON_GVPO_REHEARSAL"  # set by `rehearse` in its own processes, and nowhere else


def check_gpu_packages() -> None:
    """Raises ConfigError if torch would not find the GPUs, or Megatron would lack Transformer Engine.

    Without this check a run would train on the CPU in silence, or end in an import.
    """
    built, known = cuda_of_torch(), driver_cuda()
    if built is None:
        return
    if known is not None and known < int(built.split(".")[0]):
        raise ConfigError(
            f"this machine's GPUs: torch is built for CUDA {built}, and the driver {driver_version()} knows "
            f"CUDA up to {known}, so torch would use the CPU: update the driver, {HIDE}"
        )
    if not has_transformer_engine():
        [install] = [one.install for one in COMPONENTS if one.name == "transformer-engine"]
        raise ConfigError(
            "this machine's GPUs: Transformer Engine with its compiled torch extension is missing, which "
            f"Megatron's layers need there: {install} (docs/howto/install.md), {HIDE}"
        )


def check_delta_nets(key: str, otherwise: str = f", {HIDE}") -> None:
    """Raises ConfigError, which names `key`, if this environment has no kernels for gated delta nets.

    `otherwise`: another remedy, at the end of the message.
    """
    if util.find_spec("fla") is None:
        [install] = [one.install for one in COMPONENTS if one.name == "flash-linear-attention"]
        raise ConfigError(
            f"{key}: its gated delta nets need flash-linear-attention on a GPU, which is missing: {install}"
            f"{otherwise}"
        )


def check_no_gpu_is_missed() -> None:
    """Raises ConfigError if torch, which it imports, finds no GPU and the driver lists some.

    A GPU is missed, for example, on a node whose fabric manager is not running.
    """
    import torch

    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.cuda.is_available() or torch.version.cuda is None or is_hidden or not (gpus := list_gpus()):
        return
    raise ConfigError(
        f"the driver lists {len(gpus)} GPUs, and torch finds none: mend what `python -c 'import torch; "
        f"torch.cuda.init()'` says, such as a fabric manager that does not run, {HIDE}"
    )


def check_no_null_cuda() -> None:
    """Raises ConfigError in a process that has a rehearsal's null CUDA without being a rehearsal.

    With the null CUDA such a process would compute nothing, and would not use the machine's GPU.
    """
    if os.environ.get(REHEARSAL) != "1" and hasattr(ctypes.CDLL(None), "nullcuda_counter"):
        raise ConfigError(
            f"LD_PRELOAD={os.environ.get('LD_PRELOAD', '')}: this process has the null CUDA of a rehearsal, "
            "which computes nothing: unset LD_PRELOAD"
        )


def cuda_of_torch() -> str | None:
    """The CUDA release that torch was built for; None for a build for CPUs. Raises ModuleNotFoundError."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'")
    cuda: str | None = runpy.run_path(str(Path(spec.origin).parent / "version.py"))["cuda"]
    return cuda


def has_transformer_engine() -> bool:
    """True if transformer_engine is installed with its compiled torch extension."""
    package = _transformer_engine()
    pattern = "transformer_engine_torch*.so"
    return package is not None and (any(package.parent.glob(pattern)) or any(package.rglob(pattern)))


def transformer_engine_is_partial() -> bool:
    """True if transformer_engine is installed without its compiled torch extension."""
    return _transformer_engine() is not None and not has_transformer_engine()


def _transformer_engine() -> Path | None:
    spec = util.find_spec("transformer_engine")
    locations = spec.submodule_search_locations if spec else None
    return Path(locations[0]) if locations else None
