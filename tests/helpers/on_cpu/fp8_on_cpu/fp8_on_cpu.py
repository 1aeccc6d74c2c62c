"""Block-wise FP8 linear layers for a CPU without AMX, as a plugin of each engine: dequantise, then multiply.

Only tests use it. The servers' own code loads, reloads and checksums the FP8 weights.
"""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: list[int]) -> torch.Tensor:
    n, k = weight.shape
    full = scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return x.float() @ (weight.float() * full).T


def register_in_vllm() -> None:
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.platforms.interface import PlatformEnum

    class Dequantised(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def apply_block_scaled_mm(self, A, B, As, Bs):  # noqa: N803 - theirs
            return linear(A, B, Bs, self.weight_group_shape)

    _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(Dequantised)


def register_in_sglang() -> None:
    from sglang.srt.layers.quantization import fp8

    def block_linear(input, weight, block_size, weight_scale, input_scale=None, bias=None):
        out = linear(input, weight, weight_scale, block_size).to(input.dtype)
        return out if bias is None else out + bias

    fp8._is_cpu = False  # on a CPU, SGLang requires AMX
    fp8.dispatch_w8a8_block_fp8_linear = lambda **_: block_linear
