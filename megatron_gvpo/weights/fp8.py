"""Weights for rollout models in FP8: quantised on their way, block by block, as DeepSeek-V3 is published.

`X.weight` becomes float8_e4m3fn, and `X.weight_scale_inv` (fp32, one number a block) is what to multiply it
with. SGLang and vLLM load this layout, which DeepSeek-V3, Qwen3-FP8 and others are published in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gvpo.config.schema import ConfigError
from megatron_gvpo.weights.stored_tensors import Stored

SCALE = "_scale_inv"  # after the name of a weight
MAX = 448.0  # of float8_e4m3fn
SMALLEST = 1e-4  # of what a block's largest element counts as: a block of zeros has a scale too


@dataclass(frozen=True)
class Fp8Layout:
    """Which weights a rollout model keeps in FP8, and in what blocks (rows, columns)."""

    weights: frozenset[str]
    block: tuple[int, int]
    power_of_two: bool  # scales are rounded up to one (scale_fmt ue8m0)

    def quantised(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream with each of these weights followed by its scales; one tensor at a time."""
        for name, tensor in stream:
            if name not in self.weights:
                yield name, tensor
                continue
            weight_nk, scale = quantise(tensor, self.block, self.power_of_two)
            yield name, weight_nk
            yield name + SCALE, scale


def fp8_layout(path: str, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> Fp8Layout | None:
    """The FP8 layout of the checkpoint in `path`; None for a model that is not quantised.

    Its config.json says how it is quantised; its files say which weights are, because a list of exceptions is
    in some config.json (modules_to_not_convert) and in some only in the engines' model code (DeepSeek-V3).
    Raises ConfigError for every other quantisation.
    """
    how = config.get("quantization_config")
    if how is None:
        return None
    block = how.get("weight_block_size")
    if how.get("quant_method") != "fp8" or not block or how.get("activation_scheme") != "dynamic":
        shown = {key: how.get(key) for key in ("quant_method", "weight_block_size", "activation_scheme")}
        raise ConfigError(
            f"{path}/config.json: quantization_config has {shown}; weights can be sent to models in "
            "block-wise FP8 alone: quant_method fp8, weight_block_size such as [128, 128], "
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
    """float8_e4m3fn [n, k], and scales fp32 [ceil(n / rows), ceil(k / columns)], on the weight's device.

    `weight ~ quantised * scale` in each block of (rows, columns), smaller at the edges. The rule is that of
    `per_block_cast_to_fp8` in DeepGEMM and vLLM (SGLang: in its form with powers of two), bit for bit:
    scale = max |weight| / 448, quantised = weight * (1 / scale), rounded to nearest even.
    """
    n, k = weight_nk.shape
    rows, columns = block
    padded = F.pad(weight_nk, (0, -k % columns, 0, -n % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).float().clamp(SMALLEST)
    # Divided by a tensor: a GPU would take a Python number's reciprocal, which rounds differently.
    scale = amax / torch.full_like(amax, MAX)
    if power_of_two:  # the exponent alone, rounded up: into the next one from any mantissa but 0
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    quantised = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).view_as(padded)[:n, :k]
    return quantised.contiguous(), scale.squeeze(3).squeeze(1)
