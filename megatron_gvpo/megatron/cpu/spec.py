"""The layer spec for CPU runs: megatron-core's local layers with this package's norm and attention."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from megatron_gvpo.megatron.cpu import gated_delta
from megatron_gvpo.megatron.cpu.packed_attention import InterleavedAttention, LocalAttention


def local_spec(own_spec: Any) -> Callable[..., Any]:
    """Return a function of (config, vp_stage) that gives the spec of a pipeline stage's decoder layers.

    `own_spec`: the family's own `transformer_layer_spec` in Megatron-Bridge, whose name says which parts of
    its layers differ from megatron-core's.
    """
    change = _CHANGES.get(getattr(own_spec, "__name__", ""))

    def spec_of(config: Any, vp_stage: int | None = None) -> Any:
        block = local_block_spec(config, vp_stage)
        if change is not None:
            block.layer_specs = [change(deepcopy(layer)) for layer in block.layer_specs]
        return block

    return spec_of


def local_block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the spec of this pipeline stage's decoder layers: dense, MoE, MLA or gated delta net."""
    plain = copy(config)
    plain.experimental_attention_variant = None
    block = get_gpt_decoder_block_spec(
        plain, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = LocalRMSNorm
    for spec in block.layer_specs:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = LocalRMSNorm
        attention = layer.self_attention.submodules
        attention.core_attention = LocalAttention
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            # Megatron's submodules differ between attention classes: not all have these norms.
            if getattr(attention, name, IdentityOp) not in (IdentityOp, None):
                setattr(attention, name, LocalRMSNorm)
        if config.add_bias_linear and (experts := getattr(_parts(layer.mlp), "experts", None)) is not None:
            _parts(experts).linear_fc2 = LocalRowParallelLinear
    if config.experimental_attention_variant == "gated_delta_net":
        gated_delta.install()
        linear = get_linear_attention_pattern(config)
        block.layer_specs = [
            _with_gated_delta_net(spec) if linear[number] else spec
            for spec, number in zip(block.layer_specs, _layer_numbers(config, vp_stage), strict=True)
        ]
    return block


def _with_gated_delta_net(spec: Any) -> Any:
    """Return a copy of a layer's spec with a gated delta net in place of its attention."""
    spec = copy(spec)
    spec.submodules = copy(spec.submodules)
    spec.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=LocalRMSNorm, out_proj=RowParallelLinear
        ),
    )
    return spec


def _layer_numbers(config: Any, vp_stage: int | None) -> list[int]:
    """Return the numbers, from 0, of the layers of this pipeline stage."""
    if (layout := config.pipeline_model_parallel_layout) is not None:
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def _olmoe(layer: Any) -> Any:
    from megatron.bridge.models.olmoe.olmoe_provider import OLMoESelfAttention

    layer.submodules.self_attention.module = OLMoESelfAttention
    return layer


def _minimax_m2(layer: Any) -> Any:
    from megatron.bridge.models.minimax_m2.minimax_m2_provider import FullDimKNorm, FullDimQNorm

    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm, attention.k_layernorm = FullDimQNorm, FullDimKNorm
    return layer


def _gemma3(layer: Any) -> Any:
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3SelfAttention

    attention = layer.submodules.self_attention
    attention.module = Gemma3SelfAttention
    attention.submodules.core_attention = InterleavedAttention
    return _with_norms_behind(layer)


def _exaone4(layer: Any) -> Any:
    layer = _with_norms_behind(layer)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    return layer


def _with_norms_behind(layer: Any) -> Any:
    """Add norms behind attention and MLP."""
    layer.submodules.self_attention.submodules.linear_proj = LocalRowParallelLinearLayerNorm
    _parts(layer.submodules.mlp).linear_fc2 = LocalRowParallelLinearLayerNorm
    return layer


def _parts(spec: Any) -> Any:
    """Return the submodules of a module that megatron-core gives as a partial or as a ModuleSpec."""
    return spec.keywords["submodules"] if hasattr(spec, "keywords") else spec.submodules


# The families whose layers have parts of their own, by the name of their spec in Megatron-Bridge.
_CHANGES: dict[str, Callable[[Any], Any]] = {
    "exaone4_layer_spec": _exaone4,
    "gemma3_layer_spec": _gemma3,
    "minimax_m2_layer_spec": _minimax_m2,
    "olmoe_layer_spec": _olmoe,
}


class LocalRowParallelLinear(RowParallelLinear):
    """Row-parallel layer that returns a new tensor: megatron-core's experts add a bias to it in place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(x)
        return out.clone(), bias


class LocalRowParallelLinearLayerNorm(RowParallelLinear):
    """Row-parallel layer with a norm behind it, like Megatron-Bridge's TERowParallelLinearLayerNorm."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **named: Any) -> None:
        super().__init__(input_size, output_size, config=config, **named)
        self.post_layernorm = LocalRMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out, _ = super().forward(x)
        return self.post_layernorm(out), None


class LocalRMSNorm(torch.nn.Module):
    """RMSNorm computed in fp32, with the interface of megatron-core's norm modules.

    megatron-core's own torch norm refuses sequence parallelism. This one marks its weight, so that
    `finalize_model_grads` sums the weight's gradient over the tensor-parallel group. With
    `layernorm_zero_centered_gamma` the factor is 1 + weight.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, float(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype) - self.offset)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        factor_h = self.weight.float() + self.offset if self.offset else self.weight.float()
        normed: Tensor = _RMSNorm.apply(x.float(), factor_h, self.eps)
        return normed.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """x [..., h], weight [h], both fp32 -> x / rms(x) * weight, with half of autograd's memory traffic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_h: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight_h)
        return unit * weight_h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight_h = ctx.saved_tensors
        product = grad * unit
        along_unit = (product @ weight_h).unsqueeze(-1).div_(-weight_h.shape[0])
        grad_x = (grad * weight_h).addcmul_(unit, along_unit).mul_(scale)
        return grad_x, product.flatten(0, -2).sum(0), None


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class HostCopies(TorchFunctionMode):
    """Lets Megatron's HybridDeviceOptimizer run where host and device are the same memory.

    The optimizer asks every weight if it is on the GPU, and copies the weights that it updates on the host by
    `Tensor.cpu()`. Here every tensor claims to be on the GPU, except those copies and tensors made from them.
    Enter this context to build the optimizer, inside `cuda_means_cpu`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Only the copies that are made below have this attribute.
        on_host = bool(args) and getattr(args[0], "_on_host", False)
        if func == _IS_CUDA:
            return not on_host
        if func is torch.Tensor.pin_memory:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and (on_host or func is torch.Tensor.cpu):
            out._on_host = True  # type: ignore[attr-defined]
        return out
