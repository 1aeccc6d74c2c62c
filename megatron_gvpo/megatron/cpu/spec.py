"""The layer spec for CPU runs: megatron-core's local layers with this package's norm and attention."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_gvpo.megatron.cpu import gated_delta
from megatron_gvpo.megatron.cpu.linear import LocalRowParallelLinear, LocalRowParallelLinearLayerNorm
from megatron_gvpo.megatron.cpu.norm import LocalRMSNorm
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
