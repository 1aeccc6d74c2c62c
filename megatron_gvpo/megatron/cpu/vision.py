"""Local layers for Qwen3-VL on CPU, whose modules in Megatron-Bridge name Transformer Engine's themselves.

It also defines the names of the local layers' norms for the conversion of weights. Transformer Engine keeps a
norm's weight in the linear layer behind it, and Megatron-Bridge's vision-language mappings know only that
name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_gvpo.megatron.cpu.spec import local_block_spec


class LocalLayerNorm(torch.nn.LayerNorm):
    """LayerNorm with the interface of megatron-core's norm modules, without sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class LocalVisionAttention(MegatronModule):
    """Attention in both directions within every image of a `thd` pack: [t, n, d] -> [t, n * d]."""

    def __init__(
        self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        out = []
        for parts in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            one = scaled_dot_product_attention(q, k, v, scale=self.scale)
            out.append(one[0].transpose(0, 1).flatten(1))
        return torch.cat(out)


def local_vision_spec() -> ModuleSpec:
    """Return the spec of a vision tower's layers."""
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=LocalVisionAttention, linear_proj=RowParallelLinear
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer = TransformerLayerSubmodules(
        input_layernorm=LocalLayerNorm,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.no_mask}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=LocalLayerNorm,
        mlp=ModuleSpec(module=MLP, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)


@contextlib.contextmanager
def qwen3_vl_with_local_layers(config: Any) -> Iterator[None]:
    """Context in which Qwen3-VL's modules find local layers under the names of Transformer Engine's.

    `config`: the language model's TransformerConfig.
    """
    from megatron.bridge.models.qwen_vl import qwen3_vl_provider as provider
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model

    replaced: dict[tuple[Any, str], Any] = {
        (provider, "get_gpt_layer_with_transformer_engine_spec"): lambda **_: local_block_spec(config),
        (model, "get_vit_layer_with_transformer_engine_spec"): local_vision_spec,
        (model, "TENorm"): LocalLayerNorm,
        (model, "TEColumnParallelLinear"): ColumnParallelLinear,
        (model, "TERowParallelLinear"): RowParallelLinear,
    }
    originals = {(module, name): getattr(module, name) for module, name in replaced}
    for (module, name), value in replaced.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in originals.items():
            setattr(module, name, value)


def map_local_norms(model_bridge: type[Any]) -> None:
    """Add the names of local layers' norms to the mappings of a class of Megatron-Bridge, once."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    plain = model_bridge.mapping_registry
    if getattr(plain, "has_local_norms", False):
        return
    is_qwen3 = "qwen3" in model_bridge.__name__.lower()
    AutoMapping.register_module_type(LocalLayerNorm.__name__, "replicated")
    layer = "language_model.decoder.layers.*"
    hf_layer = "model.language_model.layers.*" if is_qwen3 else "model.layers.*"
    names = {
        f"{layer}.input_layernorm.weight": f"{hf_layer}.input_layernorm.weight",
        f"{layer}.pre_mlp_layernorm.weight": f"{hf_layer}.post_attention_layernorm.weight",
    }
    if is_qwen3:
        for local, stored in (("input_layernorm", "norm1"), ("pre_mlp_layernorm", "norm2")):
            for part in ("weight", "bias"):
                block = "vision_model.decoder.layers.*"
                names[f"{block}.{local}.{part}"] = f"model.visual.blocks.*.{stored}.{part}"

    def mapping_registry(self: Any) -> Any:
        added = [AutoMapping(megatron_param=local, hf_param=stored) for local, stored in names.items()]
        return MegatronMappingRegistry(*plain(self).mappings, *added)

    mapping_registry.has_local_norms = True  # type: ignore[attr-defined]
    model_bridge.mapping_registry = mapping_registry
