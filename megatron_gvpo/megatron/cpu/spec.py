"""The layer spec for CPU runs: megatron-core's local layers with this package's norm and attention."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp

from megatron_gvpo.megatron.cpu.norm import LocalRMSNorm
from megatron_gvpo.megatron.cpu.packed_attention import LocalAttention


def local_block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the spec of this pipeline stage's decoder layers: dense, MoE or MLA."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
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
    return block
