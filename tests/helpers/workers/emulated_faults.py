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


_LINEAR = "transformer_engine.pytorch.module.linear"
ONE: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
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
}
TWO: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "nothing": contextlib.nullcontext,
    "a missed all-reduce": lambda: replaced(_LINEAR, "allreduce", _nothing),
    "a missed all-reduce in the backward": lambda: replaced(
        "transformer_engine.pytorch.module.layernorm_linear", "allreduce", _nothing
    ),
}


def run(directory: str) -> None:
    """Write {fault: gradients, or the error that it raised} for this number of ranks to results-N.pt."""
    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    case: Case = torch.load(folder / "work.pt", weights_only=False)
    size = dist.get_world_size()
    config = config_of(case, Layout(size, tp=size), folder)
    policy = Policy.of(config)
    results: dict[str, dict[str, Tensor] | str] = {}
    for name, fault in (ONE if size == 1 else TWO).items():
        with fault():
            try:
                results[name] = _gradients(policy, case, config).gradients
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
        policy.optimizer.__dict__.pop("apply", None)
        for chunk in policy.model.chunks:
            chunk.zero_grad_buffer()
    if dist.get_rank() == 0:
        torch.save(results, folder / f"results-{size}.pt")
