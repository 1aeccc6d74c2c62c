"""Makes unmodified megatron-core run on CPU and gloo.

`install()` replaces, once, the `torch.cuda` functions that megatron-core calls for streams, events, random
states and the current device. Inside the context `cuda_means_cpu()`, every explicit CUDA device argument
(`device="cuda"`, `.cuda()`, `.to("cuda")`) means the CPU. The context is per thread and costs a little on
every torch call, so only code that runs Megatron enters it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ProcessGroupGloo, distributed_c10d
from torch.overrides import TorchFunctionMode

from megatron_gvpo.core import unequal_pieces
from megatron_gvpo.kernels import onednn

_CPU = torch.device("cpu")
_ATTENTION_FLAGS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_installed = False


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers compare the type's name with 'torch.cuda.FloatTensor' and the like.
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.record_stream:
            return None
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return _replacements.get(func, func)(*args, **kwargs)


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _Stream:
    """Replaces torch.cuda.Stream and Event; it does nothing, because a CPU is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__

    def elapsed_time(self, other: _Stream) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self  # wait_stream(), record_event(), synchronize(), ...


class _Event(_Stream):
    pass


@contextlib.contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """Run a block of Megatron code with every CUDA device argument meaning the CPU."""
    with _CudaMeansCpu():
        yield


@contextlib.contextmanager
def attention_flags_kept() -> Iterator[None]:
    """Context that restores Transformer Engine's environment variables, which nothing reads on a CPU.

    megatron-core sets them for a model's attention backend, and refuses values that an earlier model or the
    parent process has set for another backend.
    """
    saved = {name: os.environ.pop(name, None) for name in _ATTENTION_FLAGS}
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def install() -> None:
    """Replace the CUDA functions that megatron-core calls. Call this before megatron.core is imported.

    Raises RuntimeError on a machine with CUDA.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("the CPU replacements must not be installed on a machine with CUDA")
    if _installed:
        return
    _installed = True
    # megatron-core takes Transformer Engine's optimizer kernels wherever they can be imported, and a process
    # may have been told to leave its GPUs unused. With None, an import raises ModuleNotFoundError.
    for name in ("transformer_engine", "transformer_engine_torch"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    # megatron-core's jit_fuser is torch.compile, whose cache asks for the GPU's name. The environment
    # variable is for child processes. Though disabled, torch.compile would import its default backend,
    # Inductor.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    torch._dynamo.config.disable = True
    torch.compiler.set_default_backend("eager")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    # Each name gets its own object: dynamo refuses one function under two names.
    for name in ("set_device", "synchronize", "_lazy_init"):
        setattr(cuda, name, _nothing())
    if onednn.is_faster():
        _replacements.update(onednn.REPLACEMENTS)
    keep_freed()
    cuda.empty_cache = lambda: trim()
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *args, **kwargs: _Stream()
    cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    c10d: Any = distributed_c10d
    c10d.ProcessGroupGloo = OneDeviceGroup
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    with cuda_means_cpu():
        _patch_megatron()


def _patch_megatron() -> None:
    """Replace the few functions that are bound in megatron-core's own modules."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    random._lazy_init = _nothing()
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # megatron-core binds this name only with Transformer Engine, but reads it in any case.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # megatron-core converts split sizes to host arrays only from a GPU; here they are on the host already.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def _nothing() -> Callable[..., None]:
    return lambda *args, **kwargs: None


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
_KEPT_BYTES = 2**30  # free bytes that stay at the heap's end; glibc returns more than that at once
_MAPPED_BYTES = 2**25  # a block of this size or more is a mapping of its own; glibc allows no more

_libc = ctypes.CDLL(None)
_is_glibc = hasattr(_libc, "mallopt") and hasattr(_libc, "malloc_trim")  # other libraries keep freed memory


def keep_freed() -> None:
    """Let glibc keep freed memory in the process for reuse, like PyTorch's CUDA allocator.

    By default glibc returns the memory of a micro-batch's activations to the system. For the next micro-batch
    the system maps and zeroes every page again, tens of thousands a step: a tenth of the time of a small
    model's step.
    """
    if _is_glibc:
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        _libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim() -> None:
    """Return all free memory to the system: torch.cuda.empty_cache for a CPU."""
    if _is_glibc:
        _libc.malloc_trim(0)


_PARALLEL = 2**15  # elements from which on PyTorch shares an operation between threads

_devices: list[Any] = []  # the devices of a first group, which gloo chose by the environment
os.register_at_fork(after_in_child=_devices.clear)  # a forked child does not have their threads


class OneDeviceGroup(ProcessGroupGloo):
    """A gloo group that leaves the cores to the threads that compute.

    megatron-core creates some two dozen groups a process. Each would have a gloo device of its own, whose
    thread wakes a hundred times a second; together they waste 3% of a core. Here all groups share one device.

    A group's worker thread copies gathered data with PyTorch, which would start an OpenMP team for it. If a
    process has more OpenMP threads than cores, libgomp puts every idle thread to sleep at once, the computing
    ones included, thousands of times a step. So a group has one worker thread, which copies without a team.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        gloo: Any = ProcessGroupGloo
        if not _devices:
            _devices.extend(gloo(HashStore(), 0, 1, timeout).options._devices)
        options = gloo._Options()
        options._timeout, options._devices, options._threads = timeout, _devices, 1
        super().__init__(store, rank, size, options)
        self._limit_worker_threads()

    def _limit_worker_threads(self) -> None:
        """Run one operation large enough for a team, with PyTorch limited to one thread.

        The worker thread takes over PyTorch's number of threads at its first such operation, and keeps it.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            local = torch.zeros(_PARALLEL)
            group: Any = self
            group.allgather([[torch.empty_like(local) for _ in range(self.size())]], [local]).wait()
        finally:
            torch.set_num_threads(threads)


def _unless_in_place(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective so that it does nothing where its output is its input: then its group has one rank.

    Megatron's distributed optimizer gathers weights and reduces gradients in place, and gloo would copy them.
    """

    def wrapped(output: Tensor, source: Tensor, **named: Any) -> Any:
        if output.is_set_to(source) and not named["async_op"]:
            return None
        return collective(output, source, **named)

    return wrapped


# torch 2.13 has the first two in place of the others, by which older versions go.
_SINGLE = ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor")

REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    dist.all_gather: unequal_pieces.all_gather,
    dist.reduce_scatter: unequal_pieces.reduce_scatter,
    **{getattr(dist, name): _unless_in_place(getattr(dist, name)) for name in _SINGLE if hasattr(dist, name)},
}
_replacements = dict(REPLACEMENTS)
