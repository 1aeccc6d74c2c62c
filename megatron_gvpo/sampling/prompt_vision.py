"""The inputs that a transformers model takes for a batch with images: pixels, and positions in three axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.images.image import Image
from megatron_gvpo.images.processor import ImageProcessor


class PromptVision:
    """The images of prompts, for one model."""

    def __init__(self, model: Any, processor: ImageProcessor) -> None:
        self._model, self._processor = model.model, processor
        self._placeholder: int = model.config.image_token_id

    def inputs(self, images: Sequence[Sequence[Image]], device: torch.device) -> dict[str, Tensor]:
        """The arguments of the model's forward pass for prompts with these images. Raises ImageError."""
        flat = [image for of_prompt in images for image in of_prompt]
        if not flat:
            return {}
        pixels = torch.cat([self._processor.pixels(image) for image in flat])
        grid = torch.tensor([image.grid for image in flat], device=device)
        return {"pixel_values": pixels.to(device), "image_grid_thw": grid}

    def positions(self, ids: Tensor, mask: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Positions of padded prompts [rows, columns] in three axes, [3, rows, columns], and what follows.

        The second value, [rows], is the next token's position less its place: an image has more tokens than
        positions.
        """
        kinds = ((ids == self._placeholder) & mask.bool()).int()
        grid = given.get("image_grid_thw")
        positions, further = self._model.get_rope_index(ids, kinds, grid, attention_mask=mask)
        return positions, further.squeeze(1)
