"""Rank function of test_gpu_faults.py: an update's gradient for each deliberate fault of code for GPUs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.distributed import run_number
from helpers.workers.gradient_worker import Case, Layout, config_of, gradients_of

Change = Callable[[list[Any], dict[str, Any]], None]  # changes the arguments of a compiled function


@dataclass(frozen=True)
class Result:
    """An update with a fault, or the error that the fault raised."""

    gradients: dict[str, Tensor]
    norm: float  # the optimizer's norm of the gradient
    error: str | None = None
    reached: int = 0  # the number of calls of the code with the fault; 0: it never ran
    loss: float = math.nan


_calls: list[str] = []  # the calls of code with the present fault


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        _calls.append(name)
        return function(*args, **options)

    return call


@contextlib.contextmanager
def changed(name: str, change: Change, module: str = "transformer_engine_torch") -> Iterator[None]:
    """Context in which `module` calls a compiled function of Transformer Engine with other arguments."""
    owner = importlib.import_module(module)
    function = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        changeable = list(args)
        change(changeable, options)
        if any(new is not old for new, old in zip(changeable, args, strict=True)):
            _calls.append(name)
        return function(*changeable, **options)

    with mock.patch.object(owner, name, call):
        yield


@contextlib.contextmanager
def replaced(module: str, name: str, function: Any) -> Iterator[None]:
    with mock.patch(f"{module}.{name}", _counted(name, function)):
        yield


def gemm(change: Change, is_backward: bool | None = None) -> contextlib.AbstractContextManager[None]:
    def only(args: list[Any], options: dict[str, Any]) -> None:
        if is_backward is None or bool(args[11]) == is_backward:
            change(args, options)

    return changed("generic_gemm", only)


def _forget_accumulation(args: list[Any], options: dict[str, Any]) -> None:
    if args[14]:
        args[14], options["beta"] = False, 0.0


def _transpose_square_weight(args: list[Any], options: dict[str, Any]) -> None:
    weight = args[0]
    if weight.dim() == 2 and weight.shape[0] == weight.shape[1]:
        args[0] = weight.t().contiguous()


def _scale(factor: float, position: int) -> Change:
    def change(args: list[Any], options: dict[str, Any]) -> None:
        args[position] = args[position] * factor

    return change


def _shift_offsets(args: list[Any], options: dict[str, Any]) -> None:
    """Sequences begin and end one token late."""
    for i, argument in enumerate(args):
        is_offsets = isinstance(argument, Tensor) and argument.dtype == torch.int32 and argument.dim() == 1
        if is_offsets and argument.numel() > 2:
            shifted = argument.clone()
            shifted[1:-1] += 1
            args[i] = shifted


def _as_of_no_mask(args: list[Any], options: dict[str, Any]) -> None:
    import transformer_engine_torch as extension

    for i, argument in enumerate(args):
        if isinstance(argument, extension.NVTE_Mask_Type):
            args[i] = extension.NVTE_Mask_Type.NVTE_PADDING_MASK
        if isinstance(argument, list | tuple) and list(argument) == [-1, 0]:
            args[i] = (-1, -1)


def _plus_one(args: list[Any], options: dict[str, Any]) -> None:
    args[-1] = True  # the kernel then adds 1 to each gamma


def _interleave(args: list[Any], options: dict[str, Any]) -> None:
    args[4] = not args[4]


def _reverse_lengths(args: list[Any], options: dict[str, Any]) -> None:
    """The lengths of a pack's sequences come in reverse order, which changes the positions of tokens."""
    ends = args[5]
    args[5] = (ends[-1] - ends).flip(0).contiguous()


def _swapped_swiglu(y: Tensor) -> Tensor:
    gate, linear = y.chunk(2, -1)
    return torch.nn.functional.silu(linear) * gate


def _nothing(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return x, None


def _of_the_next(position: int, dim: int = 0) -> Change:
    """Every token, or head, gets the values of the token or head before it."""

    def change(args: list[Any], options: dict[str, Any]) -> None:
        argument = args[position]
        is_list = isinstance(argument, list | tuple)
        args[position] = [argument[0].roll(1, dim), *argument[1:]] if is_list else argument.roll(1, dim)

    return change


def _swapped(one: int, other: int) -> Change:
    def change(args: list[Any], options: dict[str, Any]) -> None:
        args[one], args[other] = args[other], args[one]

    return change


def _swap_halves(args: list[Any], options: dict[str, Any]) -> None:
    """The half of a sequence to which a step adds is overwritten, and the other is added to."""
    if "none" not in args[3:5]:
        args[3], args[4] = args[4], args[3]


@contextlib.contextmanager
def double_bias_gradients() -> Iterator[None]:
    import transformer_engine_torch as extension

    product = extension.generic_gemm

    def doubled(*args: Any, **options: Any) -> Any:
        out, bias_gradient, *others = product(*args, **options)
        if bias_gradient is None:
            return [out, None, *others]
        _calls.append("generic_gemm")
        return [out, 2 * bias_gradient, *others]

    with mock.patch.object(extension, "generic_gemm", doubled):
        yield


@contextlib.contextmanager
def one_transposed_weight_gradient() -> Iterator[None]:
    """In one layer the gradient of the square weight is added transposed."""
    import transformer_engine_torch as extension

    product = extension.generic_gemm
    layers, square = 4, 0

    def transposed(*args: Any, **options: Any) -> Any:
        nonlocal square
        out, is_of_weight = args[4], bool(args[11]) and not args[1] and args[3]
        if not is_of_weight or out is None or out.shape[0] != out.shape[1]:
            return product(*args, **options)
        square += 1
        before = out.clone()
        result = product(*args, **options)
        if square % layers == 0:
            _calls.append("generic_gemm")
            out.copy_(before + (out - before).T)
        return result

    with mock.patch.object(extension, "generic_gemm", transposed):
        yield


@contextlib.contextmanager
def half_a_norm() -> Iterator[None]:
    """The norm by which gradients are clipped has every second gradient only."""
    from megatron.core.optimizer import optimizer

    norm = optimizer.get_grad_norm_fp32

    def half(gradients: Any, *args: Any, **options: Any) -> Any:
        return norm(gradients[::2], *args, **options)

    with mock.patch.object(optimizer, "get_grad_norm_fp32", _counted("get_grad_norm_fp32", half)):
        yield


@contextlib.contextmanager
def divided_twice() -> Iterator[None]:
    """Gradients are divided by the number of data-parallel ranks once more than the loss expects."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    start = _ParamAndGradBucketGroup.start_grad_sync

    def call(self: Any, *args: Any, **options: Any) -> Any:
        factors = [bucket.gradient_scaling_factor for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.gradient_scaling_factor /= dist.get_world_size()
        try:
            return start(self, *args, **options)
        finally:
            for bucket, factor in zip(self.buckets, factors, strict=True):
                bucket.gradient_scaling_factor = factor

    with mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", _counted("start_grad_sync", call)):
        yield


@contextlib.contextmanager
def gathers_without_a_wait() -> Iterator[None]:
    """As after an update, the forward gathers weights, and then reads others' parts as they were before."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start, finish = Group.start_param_sync, Group.finish_param_sync
    gathered: list[tuple[Tensor, Tensor]] = []  # parts of the weights, with their gathered values
    begun: set[int] = set()  # groups of buckets whose gather has begun

    def finish_of_update(self: Any, *args: Any, **options: Any) -> None:
        if id(self) not in begun:
            begun.add(id(self))
            self.param_gather_dispatched = False
        finish(self, *args, **options)

    def start_late(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        if self.param_gather_handle is None:  # this is the gather of an export, which waits
            return
        _calls.append("start_param_sync")
        self.param_gather_handle.wait()
        for bucket in self.buckets:
            parts = list(bucket.param_data.chunk(dist.get_world_size()))
            del parts[dist.get_rank()]
            gathered.extend((part, part.clone()) for part in parts)
            for part in parts:
                part.mul_(0.9)
        self.param_gather_handle = SimpleNamespace(wait=lambda: None)

    with (
        mock.patch.object(Group, "finish_param_sync", finish_of_update),
        mock.patch.object(Group, "start_param_sync", start_late),
    ):
        yield
    for part, values in reversed(gathered):
        part.copy_(values)


def _gradient_of_swapped_swiglu(grad: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = y.detach().requires_grad_()
        return torch.autograd.grad(_swapped_swiglu(leaf), leaf, grad)[0]


def _own_part(x: Tensor, group: Any, **options: Any) -> tuple[Tensor, None]:
    """A reduce-scatter that adds nothing."""
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous(), None


@contextlib.contextmanager
def gathered_in_another_order() -> Iterator[None]:
    from transformer_engine.pytorch.module import layernorm_linear

    gather = layernorm_linear.gather_along_first_dim

    def turned(*args: Any, **options: Any) -> Any:
        gathered, work = gather(*args, **options)
        if work is not None:
            work.wait()
        return gathered.roll(len(gathered) // 2, 0), None

    with mock.patch.object(layernorm_linear, "gather_along_first_dim", _counted("gather", turned)):
        yield


@contextlib.contextmanager
def buffers(change: Callable[[Tensor], Any], method: str, is_before: bool) -> Iterator[None]:
    """Context in which gradients are changed before or after a method of the object that has them."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    owner: Any = next(c for c in (DistributedDataParallel, _ParamAndGradBucketGroup) if hasattr(c, method))
    function = getattr(owner, method)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        parts = self.buffers if owner is DistributedDataParallel else self.buckets
        if is_before:
            for part in parts:
                change(part.grad_data)
        result = function(self, *args, **options)
        if not is_before:
            for part in parts:
                change(part.grad_data)
        return result

    with mock.patch.object(owner, method, _counted(method, call)):
        yield


@contextlib.contextmanager
def in_zeroed_memory(fault: Fault) -> Iterator[None]:
    """Make a fault with zeros in unwritten memory, as a GPU may have, in place of the emulated GPU's NaN."""
    from megatron_gvpo.emulation import mode
    from megatron_gvpo.rehearsal.nullcuda.aliases import alias

    def fill(made: Any) -> None:
        if isinstance(made, Tensor) and made.is_cuda and made.numel():
            alias(made).zero_()

    with mock.patch.object(mode, "_fill_unwritten", fill), fault():
        yield


def _no_message(*_: Any) -> list[Any]:
    return []


def _not_added(*_: Any, **__: Any) -> None:
    return None


_LINEAR = "transformer_engine.pytorch.module.linear"
_WRAPPED = "transformer_engine.pytorch.cpp_extensions"
_NORM_LINEAR = "transformer_engine.pytorch.module.layernorm_linear"
_RING = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
Fault = Callable[[], contextlib.AbstractContextManager[None]]
Faults = dict[str, Fault]
NO_FAULT: Fault = contextlib.nullcontext
ONE: Faults = {
    "a transposed weight": lambda: gemm(_transpose_square_weight, is_backward=False),
    "a transposed weight in the backward": lambda: gemm(_transpose_square_weight, is_backward=True),
    "main_grad overwritten": lambda: gemm(_forget_accumulation),
    "a wrong softmax scale": lambda: changed("fused_attn_fwd", _scale(1.5, 3)),
    "a wrong softmax scale in the backward": lambda: changed("fused_attn_bwd", _scale(1.5, 2)),
    "offsets of the pack": lambda: changed("fused_attn_fwd", _shift_offsets),
    "offsets of the pack in the backward": lambda: changed("fused_attn_bwd", _shift_offsets),
    "no causal mask": lambda: changed("fused_attn_fwd", _as_of_no_mask),
    "a norm around 1 in the backward": lambda: changed("rmsnorm_bwd", _plus_one),
    "interleaved rotary": lambda: changed("fused_rope_forward", _interleave),
    "rotary not turned back": lambda: changed("fused_rope_backward", _interleave),
    "positions of a pack": lambda: changed("fused_rope_forward", _reverse_lengths),
    "gate and linear swapped": lambda: replaced(
        "megatron.core.fusions.fused_bias_swiglu", "swiglu", _swapped_swiglu
    ),
    "gate and linear swapped in the backward": lambda: replaced(
        "megatron.core.fusions.fused_bias_swiglu", "swiglu_back", _gradient_of_swapped_swiglu
    ),
    "keys and values swapped": lambda: changed("fused_attn_fwd", _swapped(17, 18)),
    "heads in another order": lambda: changed("fused_attn_fwd", _of_the_next(16, dim=1)),
    "attention's statistics of another token": lambda: changed("fused_attn_bwd", _of_the_next(25)),
    "attention's outputs of another token": lambda: changed("fused_attn_bwd", _of_the_next(22)),
    "a norm's statistics of another token": lambda: changed("rmsnorm_bwd", _of_the_next(2)),
    "rotary by half the angles": lambda: changed("fused_rope_forward", _scale(0.5, 1)),
    "a bias' gradient twice": double_bias_gradients,
    "main_grad not zeroed": lambda: buffers(lambda g: g.add_(0.01), "zero_grad_buffer", is_before=False),
    "one transposed weight gradient": one_transposed_weight_gradient,
    "a norm of half the gradients": half_a_norm,
}
# Rounding to bf16 hides these faults.
EXACT: Faults = {
    "another epsilon of a norm": lambda: changed("rmsnorm_fwd", _scale(10, 2), _WRAPPED),
}
TENSOR: Faults = {
    "a missed all-reduce": lambda: replaced(_LINEAR, "allreduce", _nothing),
    "a missed all-reduce in the backward": lambda: replaced(_NORM_LINEAR, "allreduce", _nothing),
}
SEQUENCE: Faults = {
    "a missed reduce-scatter": lambda: replaced(_LINEAR, "reduce_scatter_along_first_dim", _own_part),
    "a missed reduce-scatter in the backward": lambda: replaced(
        _NORM_LINEAR, "reduce_scatter_along_first_dim", _own_part
    ),
    "ranks' tokens in another order": gathered_in_another_order,
    "norms' gradients of one rank": lambda: replaced(
        _FINALIZE, "_allreduce_non_tensor_model_parallel_grads", _not_added
    ),
}
_SILENT = functools.partial(replaced, _RING, "flash_attn_p2p_communicate", _no_message)
_OVERWRITTEN = functools.partial(changed, "thd_grad_correction", _swap_halves)
CONTEXT: Faults = {
    "a ring that sends nothing": _SILENT,
    "a ring that sends nothing, in memory of zeros": lambda: in_zeroed_memory(_SILENT),
    "a step's outputs not added": lambda: replaced(
        "transformer_engine_torch", "thd_out_correction", _not_added
    ),
    "a step's gradients overwritten": _OVERWRITTEN,
    "a step's gradients overwritten, in memory of zeros": lambda: in_zeroed_memory(_OVERWRITTEN),
}
DATA: Faults = {
    "gradients of one rank": lambda: replaced(_BUFFER, "dist_reduce_scatter_func", _not_added),
    "gradients divided twice by the ranks": divided_twice,
    "weights read before they are gathered": gathers_without_a_wait,
}
# A dtype, a layout, and the faults that are made in it.
GROUPS: list[tuple[str, Layout, Faults]] = [
    ("bfloat16", Layout(1), ONE),
    ("bfloat16", Layout(2, tp=2), TENSOR),
    ("bfloat16", Layout(2, tp=2, sequence_parallel=True), SEQUENCE),
    ("bfloat16", Layout(2, cp=2), CONTEXT),
    ("bfloat16", Layout(2, overlap=True), DATA),
    ("float32", Layout(1), EXACT),
]


def run(directory: str) -> None:
    """Write results-DTYPE-LAYOUT.pt: {fault: Result}."""
    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    case: Case = torch.load(folder / "work.pt", weights_only=False)
    dtype, layout, faults = GROUPS[run_number()]
    config = config_of(replace(case, dtype=dtype), layout, folder)
    policy = Policy.of(config)
    results: dict[str, Result] = {}
    for name, fault in {"nothing": NO_FAULT, **faults, "nothing at the end": NO_FAULT}.items():
        print(f"{dtype}, {layout}: {name}", flush=True)
        results[name] = updated(fault, policy, case, config)
    if dist.get_rank() == 0:
        torch.save(results, folder / f"results-{dtype}-{layout}.pt")


def updated(fault: Fault, policy: Any, case: Case, config: Any) -> Result:
    """The gradients of a step with a fault. The weights do not change."""
    _calls.clear()
    with fault():
        try:
            outcome = gradients_of(policy, case, config)
            result = Result(outcome.gradients, outcome.grad_norm, None, len(_calls), outcome.metrics["loss"])
        except Exception as error:
            result = Result({}, 0.0, f"{type(error).__name__}: {error}", len(_calls))
    policy.optimizer.__dict__.pop("apply", None)
    for chunk in policy.model.chunks:
        chunk.zero_grad_buffer()
    return result
