"""Computes every ATen operation on `cuda` tensors with the CPU's kernel, over the same memory.

An operation first runs as on a GPU: PyTorch's CUDA code checks devices, dtypes and shapes and allocates
results from its own allocator, while the null CUDA skips the kernels. Then the CPU's kernel computes the
values into that memory. For an operation whose CUDA code reads the results of a kernel (the count of
`nonzero`), or that calls cuDNN or cuSOLVER, the CPU computes first, and the results are then copied to the
device.

Random numbers depend on the seed and offset of the CUDA generator, which CUDA's own code advances. So they
repeat wherever a GPU would repeat its numbers, but they differ from the GPU's.

Memory from `empty` and similar functions is filled with NaN, or with an integer's largest value, so that a
result which wrongly depends on it is noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from megatron_gvpo.emulation import collectives, decompositions
from megatron_gvpo.rehearsal.nullcuda.aliases import (
    alias,
    aliases,
    computed_first,
    has_mask,
    overwrite,
    tensors_of,
)

aten = torch.ops.aten


class EmulationError(RuntimeError):
    """Raised for an operation that the emulated GPU cannot compute; the message names the operation."""


# Operations without a kernel: they allocate memory or describe it, or CUDA itself copies the bytes.
_MEMORY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}
_AS_ON_CUDA = {
    *("set_", "resize_", "resize_as_", "record_stream", "is_pinned", "_pin_memory", "lift", "lift_fresh"),
    *(
        "_local_scalar_dense",
        "is_set_to",
        "is_same_size",
        "_unsafe_view",
        "_reshape_alias",
        "_debug_has_internal_overlap",
    ),
    *("_nested_tensor_from_mask_left_aligned", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"),
}
# Operations whose CUDA code reads results of its kernels on the host, or calls cuDNN, cuSOLVER or cuFFT.
_FROM_HOST = re.compile(
    r"nonzero|masked_select|_?unique\w*|repeat_interleave|bincount|histc|embedding_dense_backward|_embedding_bag\w*"
    r"|multinomial|equal|mode|median|nanmedian|_?linalg_\w+|_cholesky\w*|cholesky\w*|triangular_solve|_fft_\w+"
    r"|convolution\w*|_convolution\w*|_is_any_true|_is_all_true|_assert_async|isin|masked_scatter\w*|_?segment_reduce\w*"
    r"|log_sigmoid_forward|_?native_batch_norm\w*|_batch_norm\w*|cudnn_\w+|grid_sampler\w*|geqrf|ormqr"
    r"|_to_sparse\w*|_coalesce"
)


class Values(TorchDispatchMode):
    """While it is entered, a thread's operations on `cuda` tensors have values, in backward passes too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_of(args), *tensors_of(kwargs)]
        if any(type(t) is not torch.Tensor and _is_wrapper(t) for t in tensors):
            return NotImplemented  # a tensor that wraps others; its own code then calls with the inner ones
        device = kwargs.get("device")
        is_made_there = device is not None and torch.device(device).type == "cuda"
        if not is_made_there and not any(t.is_cuda for t in tensors):
            return func(*args, **kwargs)
        return _way(func)(func, args, kwargs)


@functools.cache
def _wraps(kind: type) -> bool:
    dispatch = getattr(kind, "__torch_dispatch__", torch._C._disabled_torch_dispatch_impl)
    return dispatch is not torch._C._disabled_torch_dispatch_impl


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return _wraps(type(tensor))


Way = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@functools.cache
def _way(func: Any) -> Way:
    """Return the function that computes an operation from the operation, its arguments and its keywords."""
    if func.namespace == "c10d":
        return collectives.run
    if func._schema.name in OPDEFS:
        return _by_its_python
    if func.namespace not in ("aten", "prims"):
        raise EmulationError(f"the emulated GPU cannot compute {func}")
    if _is_composed(func):  # PyTorch has not decomposed it yet inside a custom operation
        return _decomposed
    name = func._schema.name.split("::")[1]
    if func.is_view or name in _AS_ON_CUDA or torch.Tag.inplace_view in func.tags:
        return _on_cuda
    if name in _MEMORY:
        return _unwritten
    if name in ("_to_copy", "copy_"):
        return _copy
    if _FROM_HOST.fullmatch(name):
        way: Way = _from_host
    elif name.startswith(("index", "_index")):
        way = _indexed
    else:
        way = _on_both
    return functools.partial(_seeded, way) if torch.Tag.nondeterministic_seeded in func.tags else way


def _by_its_python(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the Python code of a custom operation, whose own operations are then computed one by one."""
    with Values():
        return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)


def _decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with Values():
        return func.decompose(*args, **kwargs)


def _on_cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _unwritten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = func(*args, **kwargs)
    _fill_unwritten(made)
    return made


def _on_both(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let CUDA's code check the arguments and allocate the results, then fill these with the CPU's values."""
    with Launches():
        made = func(*args, **kwargs)
    return _fill(func, made, compute(func, args, kwargs))


def _indexed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (_from_host if has_mask(args) else _on_both)(func, args, kwargs)


def _seeded(way: Way, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _random_numbers(args, kwargs):
        return way(func, args, kwargs)


def _is_composed(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Copy between devices or dtypes: CUDA's code checks and allocates, then the CPU copies the bytes."""
    with Launches():
        made: torch.Tensor = func(*args, **kwargs)
    source = args[1] if func._schema.name == "aten::copy_" else args[0]
    if made.device.type != "meta":
        alias(made).copy_(alias(source))
    return made


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU and return its results.

    The operation may change its arguments in place.
    """
    host_args, host_kwargs = aliases(args), aliases(kwargs)
    host_kwargs.pop("pin_memory", None)
    if host_kwargs.get("generator") is not None:
        host_kwargs["generator"] = None  # `_random_numbers` has seeded the CPU's generator
    if (own := decompositions.TABLE.get(func)) is not None:
        return own(*host_args, **host_kwargs)
    try:
        return func(*host_args, **host_kwargs)
    except NotImplementedError as error:
        if (decomposition := decomposition_table.get(func)) is None:
            raise EmulationError(f"the emulated GPU cannot compute {func}: {_first_line(error)}") from None
        return decomposition(*host_args, **host_kwargs)


def _fill(func: Any, made: Any, computed: Any) -> Any:
    """Write the computed values into the tensors that CUDA's code allocated, and return these tensors."""
    if type(made) is torch.Tensor and type(computed) is torch.Tensor:
        return _filled(func, made, computed)
    outs, tree = tree_flatten(made)
    results = tree_leaves(computed)
    if len(outs) != len(results):
        raise EmulationError(f"{func}: {len(outs)} results on CUDA, {len(results)} on the CPU")
    values = []
    for out, result in zip(outs, results, strict=True):
        if not isinstance(out, torch.Tensor):
            values.append(result)
            continue
        values.append(_filled(func, out, result) if isinstance(result, torch.Tensor) else out)
    return tree_unflatten(values, tree)


def _filled(func: Any, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if out.shape != result.shape:
        raise EmulationError(f"{func}: {list(out.shape)} on CUDA, {list(result.shape)} on the CPU")
    overwrite(out, result)
    return out


def _from_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return computed_first(compute, func, args, kwargs)


_UNWRITTEN = 0x7F  # this byte is NaN in both float8 formats, and the largest int8


def _fill_unwritten(made: Any) -> None:
    """Fill new memory with NaN, or an integer's largest value; uint8 and booleans stay as they are."""
    if isinstance(made, torch.Tensor) and made.is_cuda and made.numel() and made.dtype != torch.bool:
        memory = alias(made)
        if memory.dtype.is_floating_point and memory.dtype.itemsize > 1:
            memory.fill_(float("nan"))
        elif memory.dtype.itemsize == 1 and memory.dtype != torch.uint8:
            memory.view(torch.uint8).fill_(_UNWRITTEN)
        elif not memory.dtype.is_floating_point and memory.dtype.itemsize > 1 and not memory.is_complex():
            memory.fill_(torch.iinfo(memory.dtype).max)


@contextlib.contextmanager
def _random_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Context for one operation: the CPU's generator gets a seed from the CUDA generator's state."""
    generator = next(
        (g for g in tree_leaves((args, kwargs)) if isinstance(g, torch.Generator)),
        torch.cuda.default_generators[torch.cuda.current_device()],
    )
    offset = generator.get_offset()
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(hash((generator.initial_seed(), offset)) & (2**63 - 1))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
    if generator.get_offset() == offset:  # CUDA's own code did not run, so it did not advance the generator
        generator.set_offset(offset + 4)


class Launches:
    """Context in which this thread may launch kernels, because the caller computes their results afterwards.

    Outside of this context the null CUDA refuses every launch.
    """

    def __enter__(self) -> None:
        self._before = _permit()(1)

    def __exit__(self, *_: object) -> None:
        _permit()(self._before)


@functools.cache
def _permit() -> Callable[[int], int]:
    permit: Callable[[int], int] = ctypes.CDLL(None).nullcuda_permit
    return permit


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def install() -> Values:
    """Enter `Values` in this thread, and in every thread that Python starts from now on."""
    mode = Values()
    mode.__enter__()
    start = threading.Thread.start

    def start_with_values(self: threading.Thread) -> None:
        self.run = _within_mode(self.run)  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_with_values  # type: ignore[method-assign]
    _show_values()
    _use_plain_attention()
    return mode


def _use_plain_attention() -> None:
    """Make PyTorch's attention run as separate operations, because the CPU lacks CUDA's fused kernels."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def _show_values() -> None:
    """Make `print` show the values of `cuda` tensors, which torch prints while no mode is entered."""
    from torch import _tensor_str

    show = _tensor_str._str

    def shown(self: torch.Tensor, **options: Any) -> str:
        if not self.is_cuda:
            return show(self, **options)
        return f"{show(alias(self), **options)[:-1]}, device='{self.device}')"

    _tensor_str._str = shown


def _within_mode(run: Callable[[], None]) -> Callable[[], None]:
    def within() -> None:
        with Values():
            run()

    return within
