"""FP8's rounding by its definition, with PyTorch's FP8 types: nothing of Transformer Engine is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Quantized:
    """A matrix's values after quantization along its rows, in fp64."""

    recipe: str
    dtype: torch.dtype = torch.float8_e4m3fn
    is_weight: bool = False

    def along_rows(self, x: Tensor, computed: Tensor | None = None, tolerance: float = 0.0) -> Tensor:
        """With one scale, or one for each block: 128 x 128 (weights), 1 x 128, 1 x 32.

        `computed`: the quantized values of a computation that is tested. Where one of them is as near to `x`
        as the nearest number of FP8, up to `tolerance` times the block's largest value, it is the result: the
        error of that computation in fp32 or bf16 decided to which side of a middle it rounded.
        """
        height, width = {
            "tensorwise": x.shape,
            "blockwise": (128 if self.is_weight else 1, 128),
            "mxfp8": (1, 32),
        }[self.recipe]

        rows, columns = x.shape

        def in_blocks(matrix: Tensor) -> Tensor:
            """The last blocks are smaller, if the size says so: zeros change no other number."""
            padded = F.pad(matrix, (0, -columns % width, 0, -rows % height))
            return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))

        x = in_blocks(x.detach().float())
        amax = x.abs().amax((1, 3), keepdim=True)
        scale = self._scale(amax)
        quantized = self._rounded(x, scale)
        if computed is not None:
            other = self._rounded(in_blocks(computed.float()), scale)
            further = (other - x).abs() - (quantized - x).abs()
            quantized = torch.where(further <= tolerance * amax, other, quantized)
        return quantized.flatten(2, 3).flatten(0, 1)[:rows, :columns]

    def along_columns(self, x: Tensor, computed: Tensor | None = None, tolerance: float = 0.0) -> Tensor:
        return self.along_rows(x.T, None if computed is None else computed.T, tolerance).T

    def _rounded(self, x: Tensor, scale: Tensor) -> Tensor:
        largest = torch.finfo(self.dtype).max
        return (x * scale).clamp(-largest, largest).to(self.dtype).double() / scale.double()

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
