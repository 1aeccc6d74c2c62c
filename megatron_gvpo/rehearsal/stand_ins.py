"""Values that a rehearsal makes up: kernels or other ranks would compute them, and sizes depend on them.

Every expert gets equally many tokens; weights that no file has are zeros; Triton's autotuner takes its first
configuration. Image grids, tokens and lengths have their values where a vision tower reads them.
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

from megatron_gvpo.rehearsal.integers import with_integers, without_integers


def install(made_weights: bool) -> None:
    """Replace the functions; `made_weights`: the model's files were made up, and hold no values."""
    take_first_configuration()
    _balance_experts()
    _know_lengths()
    _leave_adapters()
    _know_images()
    _know_delta_nets()
    if made_weights:
        _read_zeros()


def allow_forks() -> None:
    """Let a process that has used CUDA fork: the null CUDA has plain memory, which a child copies."""

    def never() -> bool:
        return False

    torch.cuda._is_in_bad_fork = never


def balanced(total: int, experts: int) -> list[int]:
    """`total` tokens, divided among experts as evenly as can be: the first ones get one more."""
    return [total // experts + (i < total % experts) for i in range(experts)]


def take_first_configuration() -> None:
    """Have Triton's autotuner take its first configuration, instead of compiling and timing all."""
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
        if local > 1:  # made anew, because it may share memory with what `preprocess` returned
            self.num_global_tokens_per_local_expert = _on_device([own] * ranks, device)
        return _on_device([n * ranks for n in own], device)

    Dispatcher.preprocess = filled


def _on_device(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """From pinned memory: another copy would count as a wait of the host, which a router does not make."""
    tensor = torch.tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _know_lengths() -> None:
    """megatron-core's rotary embedding of packs reads the sequences' lengths from the device (0.19.2).

    A kernel subtracts their ends. So it gets the ends on the host; its waits are made up for.
    """
    from megatron.core.models.common.embeddings import rope_utils

    rotate = rope_utils._apply_rotary_pos_emb_thd

    def with_lengths(
        t: torch.Tensor, ends: torch.Tensor, freqs: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        host_ends = ends.cpu()
        by_pack = freqs.size(0) == int(host_ends[-1])
        for _ in range(len(ends) if by_pack else 1):
            ends[0].item()
        return rotate(t, host_ends, freqs, *args, **options)

    rope_utils._apply_rotary_pos_emb_thd = with_lengths


def _know_images() -> None:
    """Vision-language models compute places and positions of images from tokens and grids (Bridge 0.6.2)."""
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import text_model, transformer_block
    from megatron.core.models.gpt import GPTModel
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    from megatron_gvpo.megatron.vision import VisionInputs

    VisionInputs.run = with_integers(VisionInputs.run)  # type: ignore[method-assign]
    tower, layers = transformer_block.Qwen3VLVisionTransformerBlock, transformer_block.Qwen3VLTransformerBlock
    for compiled in (GPTModel, text_model.Qwen3VLGPTModel, tower):
        compiled.forward = without_integers(compiled.forward)
    layers._deepstack_process = with_integers(layers._deepstack_process)
    attention = modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention
    attention.forward = with_integers(attention.forward)  # again in the backward pass, which recomputes it
    _do_without_cudnn()


def _know_delta_nets() -> None:
    """Gated delta nets check where sequences end, and cut them into chunks (mcore 0.19.2, fla 0.6.0)."""
    if importlib.util.find_spec("fla") is None:
        return
    from fla.ops.utils import index
    from megatron.core.ssm.gated_delta_net import common

    layers: list[Any] = [layer for layer in vars(common).values() if isinstance(layer, type)]
    for layer in layers:
        if "_resolve_cu_seqlens" in vars(layer):
            layer._resolve_cu_seqlens = with_integers(layer._resolve_cu_seqlens)
    chunks = {name: with_integers(f) for name, f in vars(index).items() if name.startswith("prepare_")}
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for name in chunks.keys() & vars(module).keys():
            setattr(module, name, chunks[name])


def _do_without_cudnn() -> None:
    """Do a vision tower's work without cuDNN, which is not there: attention by PyTorch's own flash kernel.

    Convolve a patch of a kernel's own size by a matrix product, which cuDNN makes of it, too.
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
    """New adapters keep the values that they have: to fill them, their positions are read from the device."""
    from megatron_gvpo.megatron.adapters import lora

    def leave(*_: Any, is_drawn: bool) -> None:
        return None

    lora.place_tensors = leave  # type: ignore[assignment]


@contextlib.contextmanager
def positions_of_all_ranks() -> Iterator[None]:
    """Context in which `own_weights` numbers weights on the host, and derives other ranks' numbers.

    A device would not compute the numbers, and the other ranks do not send theirs.
    """
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    from megatron_gvpo.megatron.model import own_weights

    host = _OnHost()

    def gather(self: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.is_floating_point():  # zeros, which show what a conversion adds
            return [tensor] * self.tp_size
        return [tensor + (rank - self.tp_rank) * host.size for rank in range(self.tp_size)]

    gathers = mock.patch.object(MegatronParamMapping, "gather_from_tp_ranks", gather)
    with gathers, mock.patch.object(own_weights, "torch", host):
        yield


class _OnHost:
    """torch, whose ranges and zeros are on the host; `size`: of the last tensor that was numbered."""

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
    """The tensors of a made directory are zeros that nobody reads, of the sizes in the files' headers."""
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
