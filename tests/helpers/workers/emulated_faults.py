"""Rank function of test_gpu_faults.py: an update's gradient for each deliberate fault of code for GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.distributed import run_number
from helpers.workers.gradient_worker import Case, Layout, _gradients, config_of

Change = Callable[[list[Any], dict[str, Any]], None]  # of the arguments of a compiled function


@contextlib.contextmanager
def changed(name: str, change: Change) -> Iterator[None]:
    """Inside, a compiled function of Transformer Engine gets other arguments."""
    import transformer_engine_torch as extension

    function = getattr(extension, name)

    def call(*args: Any, **options: Any) -> Any:
        changeable = list(args)
        change(changeable, options)
        return function(*changeable, **options)

    with mock.patch.object(extension, name, call):
        yield


@contextlib.contextmanager
def replaced(module: str, name: str, function: Any) -> Iterator[None]:
    with mock.patch(f"{module}.{name}", function):
        yield


def gemm(change: Change, is_backward: bool | None = None) -> contextlib.AbstractContextManager[None]:
    def only(args: list[Any], options: dict[str, Any]) -> None:
        if is_backward is None or bool(args[11]) == is_backward:
            change(args, options)

    return changed("generic_gemm", only)


def _forget_accumulation(args: list[Any], options: dict[str, Any]) -> None:
    args[14] = False


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
    args[-1] = True  # gammas are meant to be what is added to 1


def _interleave(args: list[Any], options: dict[str, Any]) -> None:
    args[4] = not args[4]


def _one_sequence(args: list[Any], options: dict[str, Any]) -> None:
    """Positions go on from one sequence of a pack to the next."""
    ends = args[5]
    args[5] = ends[[0, *[-1] * (len(ends) - 1)]].contiguous()


def _swapped_swiglu(y: Tensor) -> Tensor:
    gate, linear = y.chunk(2, -1)
    return torch.nn.functional.silu(linear) * gate


def _nothing(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return x, None


def _of_the_next(position: int, dim: int = 0) -> Change:
    """Every token, or head, gets the values of the one before it."""

    def change(args: list[Any], options: dict[str, Any]) -> None:
        argument = args[position]
        is_list = isinstance(argument, list | tuple)
        args[position] = [argument[0].roll(1, dim), *argument[1:]] if is_list else argument.roll(1, dim)

    return change


def _swapped(one: int, other: int) -> Change:
    def change(args: list[Any], options: dict[str, Any]) -> None:
        args[one], args[other] = args[other], args[one]

    return change


def _copied(args: list[Any], options: dict[str, Any]) -> None:
    args[3:5] = ["copy" if order == "add" else order for order in args[3:5]]


@contextlib.contextmanager
def double_bias_gradients() -> Iterator[None]:
    import transformer_engine_torch as extension

    product = extension.generic_gemm

    def doubled(*args: Any, **options: Any) -> Any:
        out, bias_gradient, *others = product(*args, **options)
        return [out, None if bias_gradient is None else 2 * bias_gradient, *others]

    with mock.patch.object(extension, "generic_gemm", doubled):
        yield


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

    with mock.patch.object(layernorm_linear, "gather_along_first_dim", turned):
        yield


@contextlib.contextmanager
def buffers(change: Callable[[Tensor], Any], method: str, is_before: bool) -> Iterator[None]:
    """Inside, the gradients are changed before or after a method of what holds them."""
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

    with mock.patch.object(owner, method, call):
        yield


def _no_message(*_: Any) -> list[Any]:
    return []


def _not_added(*_: Any, **__: Any) -> None:
    return None


_LINEAR = "transformer_engine.pytorch.module.linear"
_NORM_LINEAR = "transformer_engine.pytorch.module.layernorm_linear"
_RING = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
Faults = dict[str, Callable[[], contextlib.AbstractContextManager[None]]]
ONE: Faults = {
    "nothing": contextlib.nullcontext,
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
    "positions of a pack": lambda: changed("fused_rope_forward", _one_sequence),
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
}
TENSOR: Faults = {
    "nothing": contextlib.nullcontext,
    "a missed all-reduce": lambda: replaced(_LINEAR, "allreduce", _nothing),
    "a missed all-reduce in the backward": lambda: replaced(_NORM_LINEAR, "allreduce", _nothing),
}
SEQUENCE: Faults = {
    "nothing": contextlib.nullcontext,
    "a missed reduce-scatter": lambda: replaced(_LINEAR, "reduce_scatter_along_first_dim", _own_part),
    "a missed reduce-scatter in the backward": lambda: replaced(
        _NORM_LINEAR, "reduce_scatter_along_first_dim", _own_part
    ),
    "ranks' tokens in another order": gathered_in_another_order,
    "norms' gradients of one rank": lambda: replaced(
        _FINALIZE, "_allreduce_non_tensor_model_parallel_grads", _not_added
    ),
}
CONTEXT: Faults = {
    "nothing": contextlib.nullcontext,
    "a ring that sends nothing": lambda: replaced(_RING, "flash_attn_p2p_communicate", _no_message),
    "a step's outputs not added": lambda: replaced(
        "transformer_engine_torch", "thd_out_correction", _not_added
    ),
    "a step's gradients overwritten": lambda: changed("thd_grad_correction", _copied),
}
DATA: Faults = {
    "nothing": contextlib.nullcontext,
    "gradients of one rank": lambda: replaced(_BUFFER, "dist_reduce_scatter_func", _not_added),
}
# A layout, and the faults that are made in it.
GROUPS: list[tuple[Layout, Faults]] = [
    (Layout(1), ONE),
    (Layout(2, tp=2), TENSOR),
    (Layout(2, tp=2, sequence_parallel=True), SEQUENCE),
    (Layout(2, cp=2), CONTEXT),
    (Layout(2, overlap=True), DATA),
]


def run(directory: str) -> None:
    """Write results-LAYOUT.pt: {fault: (gradients, their norm), or the error that the fault raised}."""
    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    case: Case = torch.load(folder / "work.pt", weights_only=False)
    layout, faults = GROUPS[run_number()]
    config = config_of(case, layout, folder)
    policy = Policy.of(config)
    results: dict[str, tuple[dict[str, Tensor], float] | str] = {}
    for name, fault in faults.items():
        print(f"{layout}: {name}", flush=True)
        with fault():
            try:
                outcome = _gradients(policy, case, config)
                results[name] = (outcome.gradients, outcome.grad_norm)
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
        policy.optimizer.__dict__.pop("apply", None)
        for chunk in policy.model.chunks:
            chunk.zero_grad_buffer()
    if dist.get_rank() == 0:
        torch.save(results, folder / f"results-{layout}.pt")
