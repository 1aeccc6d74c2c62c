"""What runs on a GPU as one kernel instead of several: Megatron-Bridge leaves it off for most families."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F


def fusions(architecture: Any) -> dict[str, Any]:
    """Fields of the TransformerConfig, of what Megatron-Bridge made of a checkpoint's architecture."""
    settings: dict[str, Any] = {}
    # Without it megatron-core (0.19.2) rotates a pack sequence by sequence, and waits for the GPU to tell
    # their lengths, twice in every layer: for queries and for keys. Latent attention has its own rotation.
    if architecture.position_embedding_type == "rope" and not architecture.multi_latent_attention:
        settings["apply_rope_fusion"] = True
    if architecture.gated_linear_unit and architecture.activation_func is F.silu:
        settings["bias_activation_fusion"] = True  # and only the product's input is kept for the backward
    return settings


def fuse_weight_gradients(chunks: Iterable[Any]) -> None:
    """Let Transformer Engine's linear layers add their weights' gradients to Megatron's fp32 buffers.

    The product does it. Otherwise every micro-batch's gradient is rounded to bf16, written, and added by
    another kernel. megatron-core's own switch, gradient_accumulation_fusion, is for its own linear layers,
    too, and refuses (0.19.2) to build one, the output layer, without an extension of Apex; but that one's
    gradient is the fused head's.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
