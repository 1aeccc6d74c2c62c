"""Prepares a process for libraries, before they are loaded: environment variables, and open files."""

from __future__ import annotations

import logging
import os
import resource
import sys
import warnings
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megatron_gvpo.core.environment import LOOPBACK, MEGATRONS, ON_LOOPBACK
from megatron_gvpo.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_gvpo.settings.parallel import ParallelConfig
    from megatron_gvpo.settings.sections import RolloutConfig


LIBRARIES = ("megatron", "torch", "transformers", "transformer_engine", "apex", "modelopt", "triton")
OPEN_FILES = 256  # open files that a process needs for libraries, workers and servers


def prepare(parallel: ParallelConfig, rollout: RolloutConfig) -> None:
    """Set the variables that are not set yet, before torch is loaded, or at least before a GPU is used.

    Raises ConfigError if the process may not open enough files.
    """
    _allow_open_files()
    wanted = _pinned_exactly()
    if parallel.offload_modules:  # Transformer Engine reads the variable when it is imported
        wanted["NVTE_CPU_OFFLOAD_V1"] = "1"
    if parallel.tp * parallel.cp > 1:
        # Megatron launches a communication before the matrix product that hides it. GPUs up to Hopper keep
        # that order only with a single queue. Megatron-LM refuses to run without it.
        wanted[MEGATRONS] = "1"
    if rollout.engine == "sglang" and rollout.weights.traits.forms_group:
        # SGLang sets this variable in its own processes (0.5.23, engine.py). If ranks of one process group
        # differ in it, they exchange handles of GPU memory that the other side cannot open.
        wanted["NCCL_CUMEM_ENABLE"] = "0"
    if _only_this_machine(rollout):
        wanted |= ON_LOOPBACK
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def _pinned_exactly() -> dict[str, str]:
    """PyTorch's allocator setting with which pinned host memory above 64 MiB is not larger than requested.

    Otherwise PyTorch rounds sizes up to a power of two, and 8.6 GB on the host take 16: weights of a
    reference or a teacher, an offloaded optimizer, or a trainer beside colocated servers. The user's own
    settings stay.
    """
    name = "PYTORCH_ALLOC_CONF"
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or name in os.environ:
        return {}
    return {name: "pinned_max_round_threshold_mb:64"}


def _only_this_machine(rollout: RolloutConfig) -> bool:
    """True if the ranks and the servers all run here."""
    meeting = {os.environ.get("MASTER_ADDR", "127.0.0.1"), rollout.weights.address or "127.0.0.1"}
    hosts = {urlsplit(url).hostname for url in rollout.servers.urls}
    return (meeting | hosts).issubset(LOOPBACK)


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < OPEN_FILES:
        raise ConfigError(
            f"this process may open {hard} files, and a run needs {OPEN_FILES}: raise the limit (ulimit -n)"
        )
    if resource.RLIM_INFINITY != soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


def quieten() -> None:
    """Keep warnings off the terminal; python -W or PYTHONWARNINGS brings them back.

    The libraries warn about each other, and about missing packages, which `doctor` reports better.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    quieten_libraries()


def quieten_libraries() -> None:
    """Hide the libraries' warnings in Python users' terminals, but no other warnings."""
    if not sys.warnoptions:
        for library in LIBRARIES:
            warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
