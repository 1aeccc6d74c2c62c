"""FP8's rounding by its definition, with PyTorch's FP8 types: nothing of Transformer Engine is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Quantized:
    """A matrix's values after quantization along its rows, in fp64."""

    recipe: str
    dtype: torch.dtype = torch.float8_e4m3fn
    is_weight: bool = False

    def along_rows(self, x: Tensor) -> Tensor:
        """With one scale, or one for each block: 128 x 128 (weights), 1 x 128, 1 x 32."""
        height, width = {
            "tensorwise": x.shape,
            "blockwise": (128 if self.is_weight else 1, 128),
            "mxfp8": (1, 32),
        }[self.recipe]
        x = x.detach().float().unflatten(1, (-1, width)).unflatten(0, (-1, height))
        scale = self._scale(x.abs().amax((1, 3), keepdim=True))
        quantized = (x * scale).to(self.dtype).double() / scale.double()
        return quantized.flatten(2, 3).flatten(0, 1)

    def along_columns(self, x: Tensor) -> Tensor:
        return self.along_rows(x.T).T

    def _scale(self, amax: Tensor) -> Tensor:
        largest = torch.full_like(amax, torch.finfo(self.dtype).max)
        amax = torch.where(amax == 0, largest, amax)  # a block of zeros has the scale 1
        if self.recipe == "tensorwise":
            return largest / amax
        if self.recipe == "blockwise":
            return (largest.double() / amax.double()).log2().floor().exp2().float()
        return (amax.double() / largest.double()).log2().ceil().neg().exp2().float()


def quantizers(recipe: str) -> tuple[Quantized, Quantized, Quantized]:
    """One each for inputs, weights and gradients."""
    gradients = torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn
    return Quantized(recipe), Quantized(recipe, is_weight=True), Quantized(recipe, gradients)
