"""Sizes of a model's vision tower: exact parameter counts, and the operations of encoding images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionTower:
    """The vision tower of Qwen2.5-VL or Qwen3-VL. It is not trained, as `model.train_vision` has it."""

    parameters: int
    split: bool  # tensor parallelism splits it
    block_parameters: int  # that a patch is multiplied with in all layers
    merger_parameters: int  # that a token is multiplied with
    width: int  # of the attention, in all layers that attend to a whole image
    deep: int  # features for the first layers of the language model
    merge: int  # patches of a token

    def flops(self, tokens: float, patches_of_an_image: float) -> float:
        """Operations of the forward pass for images of so many tokens together."""
        patches = tokens * self.merge
        attention = 4 * self.width * patches_of_an_image
        return patches * (2 * self.block_parameters + attention) + 2 * tokens * self.merger_parameters


def vision_tower(config: Mapping[str, Any], architecture: str, size: Callable[[str], int]) -> VisionTower:
    """Builds it from the `vision_config` of a config.json; `size` reads a whole number of it by name."""
    hidden, width, depth, merge = (
        size(key) for key in ("hidden_size", "intermediate_size", "depth", "spatial_merge_size")
    )
    out, merge = size("out_hidden_size"), merge**2
    channels = config.get("in_channels", config.get("in_chans", 3))
    patch = channels * config.get("temporal_patch_size", 2) * size("patch_size") ** 2 * hidden
    attention = 4 * hidden**2 + 4 * hidden
    joined = hidden * merge
    merger = joined**2 + joined + joined * out + out
    if architecture == "Qwen2_5_VLForConditionalGeneration":
        mlp = 3 * hidden * width + 2 * width + hidden
        block, whole = attention + mlp + 2 * hidden, len(config.get("fullatt_block_indexes") or ())
        total = patch + depth * block + hidden + merger
        return VisionTower(total, False, depth * block + patch, merger, whole * hidden, 0, merge)
    deep = len(config.get("deepstack_visual_indexes") or ())
    block = attention + 2 * hidden * width + width + hidden + 4 * hidden
    total = patch + hidden + size("num_position_embeddings") * hidden + depth * block
    total += merger + 2 * hidden + deep * (merger + 2 * joined)
    mergers = (1 + deep) * merger
    return VisionTower(total, True, depth * block + patch, mergers, depth * hidden, deep, merge)
