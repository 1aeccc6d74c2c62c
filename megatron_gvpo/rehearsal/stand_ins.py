"""Values that a rehearsal makes up: sizes depend on them, and kernels or other ranks would compute them.

Every expert gets equally many tokens; weights that no file has are zeros; Triton's autotuner takes its first
configuration. The lengths of sequences have their values where gated delta nets read them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_gvpo.rehearsal.integers import with_integers


def install(made_weights: bool) -> None:
    """Replace the functions; `made_weights`: the model's files were made up, and hold no values."""
    take_first_configuration()
    _balance_experts()
    _leave_adapters()
    _know_delta_nets()
    _do_without_cudnn()
    if made_weights:
        _read_zeros()


def allow_forks() -> None:
    """Let a process that has used CUDA fork: the null CUDA has plain memory, which a child copies."""

    def never() -> bool:
        return False

    torch.cuda._is_in_bad_fork = never


def balanced(total: int, experts: int) -> list[int]:
    """`total` tokens, divided among experts as evenly as possible: the first experts get one more."""
    return [total // experts + (i < total % experts) for i in range(experts)]


def take_first_configuration() -> None:
    """Make Triton's autotuner take its first configuration, instead of compiling and timing all."""
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def first(self: Any, *args: Any, **options: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **options)

    Autotuner.run = first


def _balance_experts() -> None:
    """Give the counts of tokens that routers' kernels and a gather over ranks would give (mcore 0.19.2)."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    preprocess = Dispatcher.preprocess

    def filled(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        preprocess(self, routing_map)
        device = routing_map.device
        counts = balanced(routing_map.size(0) * self.config.moe_router_topk, self.num_experts)
        own = [counts[i] for i in self.local_expert_indices]
        local, ranks = self.num_local_experts, self.tp_size * self.ep_size
        if self.input_splits is not None:
            sent = [sum(counts[i * local : (i + 1) * local]) for i in range(self.ep_size)]
            self.input_splits.copy_(_on_device(sent, device))
            self.output_splits.copy_(_on_device([sum(own)] * self.ep_size, device))
            self.output_splits_tp.copy_(_on_device([self.ep_size * sum(own)] * self.tp_size, device))
        if local > 1:  # a new tensor, because the old one may share memory with the result of `preprocess`
            self.num_global_tokens_per_local_expert = _on_device([own] * ranks, device)
        return _on_device([n * ranks for n in own], device)

    Dispatcher.preprocess = filled


def _on_device(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """Copy from pinned memory: another copy would count as a wait of the host, which a router has not."""
    tensor = torch.tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _know_delta_nets() -> None:
    """Give gated delta nets, which cut sequences into chunks, the lengths (fla 0.6.0)."""
    if importlib.util.find_spec("fla") is None:
        return
    from fla.ops.utils import index

    chunks = {name: with_integers(f) for name, f in vars(index).items() if name.startswith("prepare_")}
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for name in chunks.keys() & vars(module).keys():
            setattr(module, name, chunks[name])


def _do_without_cudnn() -> None:
    """Make a vision tower work without cuDNN: its attention runs in PyTorch's own flash kernel.

    A convolution of patches as large as the kernel becomes a matrix product, as in cuDNN.
    """
    convolve = torch.nn.Conv3d._conv_forward

    def multiply(self: Any, patches: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        if patches.shape[2:] != weight.shape[2:]:
            return convolve(self, patches, weight, bias)
        made = torch.nn.functional.linear(patches.flatten(1), weight.flatten(1), bias)
        return made[..., None, None, None]

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.nn.Conv3d._conv_forward = multiply  # type: ignore[method-assign,assignment]


def _leave_adapters() -> None:
    """Leave new adapters unfilled, because filling them reads their positions from the device."""
    from megatron_gvpo.megatron.adapters import lora

    def leave(*_: Any, is_drawn: bool) -> None:
        return None

    lora.place_tensors = leave  # type: ignore[assignment]


@contextlib.contextmanager
def positions_of_all_ranks() -> Iterator[None]:
    """Context in which `own_weights` numbers weights on the host, and derives other ranks' numbers.

    In a rehearsal the device computes no numbers, and no other rank runs that could send its numbers.
    """
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    from megatron_gvpo.megatron.model import own_weights

    host = _OnHost()

    def gather(self: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.is_floating_point():  # in converted zeros, constants that the conversion adds are visible
            return [tensor] * self.tp_size
        return [tensor + (rank - self.tp_rank) * host.size for rank in range(self.tp_size)]

    gathers = mock.patch.object(MegatronParamMapping, "gather_from_tp_ranks", gather)
    with gathers, mock.patch.object(own_weights, "torch", host):
        yield


class _OnHost:
    """Stands for torch, with ranges and zeros on the host; `size`: of the last tensor that was numbered."""

    size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def arange(self, *bounds: int, device: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        if len(bounds) == 2:
            self.size = bounds[1] - bounds[0]
        return torch.arange(*bounds, dtype=dtype)

    def zeros_like(self, tensor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=dtype)


def _read_zeros() -> None:
    """Make every read of a weight return zeros, with the shape and dtype that the file's header names."""
    from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource
    from safetensors import safe_open

    from megatron_gvpo.huggingface.checked_weights import CheckedWeights

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}

    def load_tensors(self: Any, names: list[str]) -> dict[str, torch.Tensor]:
        tensors = {}
        for name in names:
            with safe_open(Path(self.path) / self.key_to_filename_map[name], "pt") as opened:
                header = opened.get_slice(name)
                tensors[name] = torch.zeros(header.get_shape(), dtype=dtypes[header.get_dtype()])
        return tensors

    def nothing_wrong(self: Any, name: str, tensor: torch.Tensor) -> None:
        return None

    SafeTensorsStateSource.load_tensors = load_tensors
    CheckedWeights._look = nothing_wrong  # type: ignore[method-assign]
