"""Sets up and tears down the process group and Megatron's parallel state; names the groups and the device."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_gvpo.core.environment import check_network_name
from megatron_gvpo.core.gpu_packages import check_no_gpu_is_missed, check_no_null_cuda
from megatron_gvpo.core.store import meet
from megatron_gvpo.settings.parallel import ParallelConfig

# Set these before the import: Megatron logs the modules that it cannot import, and later every parameter.
logging.getLogger("megatron").setLevel(logging.WARNING)
# Silence Megatron's warnings of deprecations.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
# Silence Megatron's warnings of missing kernels, which come from every rank.
logging.getLogger("megatron.bridge").setLevel(logging.ERROR)

if not torch.cuda.is_available():
    from megatron_gvpo.megatron.cpu import device as cpu_device

    cpu_device.install()

from megatron.core import parallel_state  # noqa: E402 - after cpu_device.install() above
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402


def megatron_device() -> contextlib.AbstractContextManager[None]:
    """Return the context to run Megatron code in: on a CPU, its CUDA device arguments mean the CPU."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return cpu_device.cuda_means_cpu()


def device() -> torch.device:
    """Return this process's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# Results also depend on timing through cuBLAS's workspaces, NCCL's choice of algorithm and TE's atomics.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def initialize(parallel: ParallelConfig, seed: int, deterministic: bool = False) -> None:
    """Join the process group (torchrun's environment, or a group of one) and create Megatron's groups.

    The groups of an earlier model of this process, which cannot be used any more, are destroyed first.
    `deterministic`: every repetition under the same layout gives the same numbers, bit for bit. Raises
    ConfigError if torch cannot use this machine's GPUs or has a null CUDA, if the other ranks do not join,
    and for a network interface that does not exist.
    """
    if deterministic:
        os.environ.update(_DETERMINISTIC)
    torch.use_deterministic_algorithms(deterministic)
    release()
    check_no_null_cuda()
    check_no_gpu_is_missed()
    check_network_name()
    timeout = timedelta(seconds=parallel.timeout_seconds)
    if not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        if "WORLD_SIZE" in os.environ:
            meet(backend, timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    with megatron_device():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            distributed_timeout_minutes=math.ceil(parallel.timeout_seconds / 60),
            # Copies of the data-parallel groups, in which every rank connects to every other: megatron-core
            # gathers the optimizer's state over them, which the checkpoints here do not.
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def rank_in_each_group() -> dict[str, int]:
    """Return this rank's index in its tensor, pipeline, context, expert and data-parallel group."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
    }


def release() -> None:
    """Destroy Megatron's groups, if there are any, and keep the process group. A collective.

    megatron-core forgets most of its groups without destroying them: each would keep its threads. The groups
    of an earlier model that is no longer used would keep their threads, too, because its parts refer to each
    other.
    """
    gc.collect()
    torch.cuda.empty_cache()
    if not parallel_state.is_initialized():
        return
    dist.barrier()  # wait until no rank communicates through the groups any more
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def shut_down() -> None:
    """Destroy Megatron's groups and leave the process group."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
