"""Quantises weights to FP8, block by block, on their way to rollout models in FP8.

`X.weight` becomes float8_e4m3fn, and `X.weight_scale_inv` (fp32, one number per block) is its factor. This is
the layout in which DeepSeek-V3, Qwen3-FP8 and others are published; SGLang and vLLM load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.complete_weights import Stored

SCALE = "_scale_inv"  # a weight's name plus this is the name of its scales
MAX = 448.0  # the largest float8_e4m3fn
SMALLEST = 1e-4  # lower bound of a block's largest magnitude, so that a block of zeros has a scale


@dataclass(frozen=True)
class Fp8Layout:
    """The weights that a rollout model keeps in FP8, and their blocks (rows, columns)."""

    weights: frozenset[str]
    block: tuple[int, int]
    power_of_two: bool  # scales are rounded up to powers of two (scale_fmt ue8m0)

    def quantised(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Quantise a stream: each FP8 weight is followed by its scales. One tensor is in memory at a time."""
        for name, tensor in stream:
            if name not in self.weights:
                yield name, tensor
                continue
            weight_nk, scale = quantise(tensor, self.block, self.power_of_two)
            yield name, weight_nk
            yield name + SCALE, scale


def fp8_layout(path: str, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> Fp8Layout | None:
    """The FP8 layout of the checkpoint in `path`; None for a model that is not quantised.

    config.json says how it is quantised. Its files say which weights are: the exceptions are listed in some
    config.json (modules_to_not_convert), but for other models only in the engines' code (DeepSeek-V3). Raises
    ConfigError for any other quantisation.
    """
    how = config.get("quantization_config")
    if how is None:
        return None
    block = how.get("weight_block_size")
    if how.get("quant_method") != "fp8" or not block or how.get("activation_scheme") != "dynamic":
        shown = {key: how.get(key) for key in ("quant_method", "weight_block_size", "activation_scheme")}
        raise ConfigError(
            f"{path}/config.json: quantization_config has {shown}; quantised models can be sent weights "
            "if they are in block-wise FP8 alone: quant_method fp8, weight_block_size such as [128, 128], "
            "activation_scheme dynamic"
        )
    weights = frozenset(name for name, tensor in stored.items() if tensor.dtype == "F8_E4M3")
    for name in weights:
        shape, scale = stored[name].shape, stored.get(name + SCALE)
        expected = tuple(-(-size // edge) for size, edge in zip(shape, block, strict=False))
        if len(shape) != 2 or scale is None or scale.shape != expected:
            raise ConfigError(
                f"{path}: {name} is in FP8 with shape {shape}, but {name + SCALE} "
                f"{'is missing' if scale is None else f'has shape {scale.shape}'}; with "
                f"weight_block_size={block} it would have shape {expected}"
            )
    if not weights:
        raise ConfigError(f"{path}: config.json has a quantization_config, but no tensor is in FP8")
    return Fp8Layout(weights, (block[0], block[1]), how.get("scale_fmt") == "ue8m0")


def quantise(
    weight_nk: Tensor, block: tuple[int, int] = (128, 128), power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise a weight [n, k] block by block.

    Returns float8_e4m3fn [n, k] and scales, fp32 [ceil(n / rows), ceil(k / columns)], on the weight's device.
    `weight ~ quantised * scale` in each block of (rows, columns); blocks at the edges are smaller. The rule
    is `per_block_cast_to_fp8` of DeepGEMM and vLLM (of SGLang with power_of_two), bit for bit:
    scale = max |weight| / 448, quantised = weight * (1 / scale), rounded to nearest even.
    """
    n, k = weight_nk.shape
    rows, columns = block
    padded = F.pad(weight_nk, (0, -k % columns, 0, -n % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).float().clamp(SMALLEST)
    # The divisor is a tensor because a GPU multiplies by a Python number's reciprocal, which rounds
    # differently.
    scale = amax / torch.full_like(amax, MAX)
    if power_of_two:  # round up to a power of two: a mantissa other than 0 gives the next exponent
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    quantised = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).view_as(padded)[:n, :k]
    return quantised.contiguous(), scale.squeeze(3).squeeze(1)
