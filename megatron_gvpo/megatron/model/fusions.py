"""Turns on fused GPU kernels that Megatron-Bridge leaves off for most model families."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F


def fusions(architecture: Any) -> dict[str, Any]:
    """Return fields to set on the TransformerConfig; `architecture` is Megatron-Bridge's provider."""
    settings: dict[str, Any] = {}
    # Without it megatron-core (0.19.2) rotates a pack sequence by sequence, and waits for the GPU to return
    # the lengths twice in every layer, for queries and for keys. Latent attention has its own rotation.
    if architecture.position_embedding_type == "rope" and not architecture.multi_latent_attention:
        settings["apply_rope_fusion"] = True
    if architecture.gated_linear_unit and architecture.activation_func is F.silu:
        settings["bias_activation_fusion"] = True  # also keeps only the activation's input for the backward
    return settings


def fuse_weight_gradients(chunks: Iterable[Any]) -> None:
    """Let Transformer Engine's linear layers add their weights' gradients to Megatron's fp32 buffers.

    The matrix product then adds the gradient itself. Otherwise every micro-batch's gradient is rounded to
    bf16, written, and added by another kernel. megatron-core's own switch, gradient_accumulation_fusion, also
    applies to its own linear layers. With it, megatron-core (0.19.2) refuses to build the output layer
    without an extension of Apex, although the fused head computes that layer's gradient.
    """
    for chunk in chunks:
        for module in chunk.modules():
            trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
            # Only Transformer Engine's linear layers have it; weights under adapters have no such buffers.
            if trained and hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
