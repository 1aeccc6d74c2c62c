"""Versions of megatron-core's layers that do not read a pack's lengths from the GPU in every layer.

megatron-core (0.19.2) rotates the queries and keys of latent attention sequence by sequence where it has no
fused kernel, and its gated delta nets compare the ends of sequences with the number of tokens. The host waits
for the GPU at each of these. Packs (`megatron/batch.py`) are made on the host, which knows these lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_gvpo.megatron.attention.core import OwnPackedSeqParams


def run_pre_hooks(module: Any) -> None:
    """Run a module's forward pre-hooks, where its weights are read without calling it.

    With overlap_param_gather, Megatron waits only in these hooks for the other ranks' part of an update.
    """
    for number, hook in module._forward_pre_hooks.items():
        if number in module._forward_pre_hooks_with_kwargs:
            hook(module, (), {})
        else:
            hook(module, ())


class PackedDeltaNet(GatedDeltaNet):
    """A gated delta net that takes the ends of a pack's sequences as they are."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run_pre_hooks(self.conv1d)  # whose weight is read without a call of it
        return super().forward(*args, **kwargs)

    def _resolve_cu_seqlens(
        self, padded: Tensor | None, actual: Tensor, total_seq_len: int, name: str, cp_size: int = 1
    ) -> Tensor:
        """Return the ends with padding, if any, else without.

        `PackedBatch` pads every sequence for context parallelism, and the last end is the number of tokens.
        """
        return actual if padded is None else padded


class _PackFrequencies(torch.nn.Module):
    """Replaces a layer's rotary module: it returns the frequencies that the pack contains."""

    def __init__(self) -> None:
        super().__init__()
        self.of_pack: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.of_pack

    @staticmethod
    def get_rotary_seq_len(*args: Any, **kwargs: Any) -> int:
        return 0


class PackedLatentAttention(MLASelfAttention):
    """Latent attention that rotates a whole pack at once, by the positions of its tokens.

    `own_rotary` has the frequencies of positions; `OwnPackedSeqParams.latent_rotation` those of the tokens.
    """

    rotary_pos_emb: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.own_rotary = self.rotary_pos_emb
        self.rotary_pos_emb = _PackFrequencies()

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: OwnPackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        pack = packed_seq_params
        assert pack is not None and pack.latent_rotation is not None
        freqs_t, scale = pack.latent_rotation
        # YaRN's module returns a scale beside them. Without the format `thd` each token has its own row.
        freqs_t = freqs_t.squeeze(1)
        self.rotary_pos_emb.of_pack = freqs_t if self.config.rope_type == "rope" else (freqs_t, scale)
        unpacked: Any = copy(pack)
        unpacked.qkv_format = "sbhd"
        try:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, unpacked, **kwargs
            )
        finally:
            self.rotary_pos_emb.of_pack = None


_PACKED = {GatedDeltaNet: PackedDeltaNet, MLASelfAttention: PackedLatentAttention}


def with_packed_layers(spec_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `spec_of`, which returns the spec of a stage's layers, to have the classes above in them.

    Latent attention with megatron-core's fused kernel, which reads the ends on the GPU, stays as it is.
    """

    def changed(config: Any, vp_stage: int | None = None) -> Any:
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

        # Megatron-Bridge divides weights by the name of their module's class, as it does GatedDeltaNet's.
        AutoMapping.register_module_type(PackedDeltaNet.__name__, "column")
        stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(spec_of).parameters else {}
        spec = spec_of(config, **stage)
        for layer in getattr(spec, "layer_specs", [spec]):
            attention = layer.submodules.self_attention
            if attention.module is MLASelfAttention and config.apply_rope_fusion:
                continue
            attention.module = _PACKED.get(attention.module, attention.module)
        return spec

    return changed


def rotary_of_latent_attention(chunks: Iterable[Any]) -> Any:
    """Return the rotary module of the first layer that rotates by a pack's positions; None without any."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return next((module.own_rotary for module in modules if isinstance(module, PackedLatentAttention)), None)
