"""Makes unmodified megatron-core run on CPU and gloo.

`install()` replaces, once, the `torch.cuda` functions that megatron-core calls for streams, events, random
states and the current device. Inside the context `cuda_means_cpu()`, every explicit CUDA device argument
(`device="cuda"`, `.cuda()`, `.to("cuda")`) means the CPU. The context is per thread and costs a little on
every torch call, so only code that runs Megatron enters it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from megatron_gvpo.kernels import onednn
from megatron_gvpo.megatron.cpu import heap, uneven_collectives
from megatron_gvpo.megatron.cpu.process_groups import OneDeviceGroup

_CPU = torch.device("cpu")
_ATTENTION_FLAGS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_installed = False
_replacements = dict(uneven_collectives.REPLACEMENTS)


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
    """Leave Transformer Engine's variables of the environment as they are, which nothing reads on a CPU.

    megatron-core sets them for a model's attention backend, and refuses values that the model before, or the
    parent process, left there for another backend.
    """
    kept = {name: os.environ.pop(name, None) for name in _ATTENTION_FLAGS}
    try:
        yield
    finally:
        for name, value in kept.items():
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
    # megatron-core's jit_fuser is torch.compile, whose cache asks for the GPU's name. The environment
    # variable is for child processes. Inductor, the default backend, would be imported nevertheless.
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
    heap.keep_freed()
    cuda.empty_cache = lambda: heap.trim()
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
