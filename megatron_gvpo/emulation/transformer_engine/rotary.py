"""Rotary position embedding. Source: transformer_engine/common/fused_rope/fused_rope.cu."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_gvpo.emulation.transformer_engine.references import read_strided, reference_of
from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Tensor = torch.Tensor


def _position(index: Tensor, length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions of a rank's tokens in the sequence; with context parallelism it has two chunks."""
    if cp_size == 1:
        return index
    half = length // 2
    second = length * cp_size - (cp_rank + 1) * length // 2 - half
    return torch.where(index < half, index + cp_rank * length // 2, index + second)


def positions(
    shape: torch.Size,
    format: str,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Return each token's position, [t], [s, b] or [b, s]; -1 for a pack's tokens after its last sequence."""
    if format == "thd":
        assert cu_seqlens is not None
        ends = (alias(cu_seqlens) // cp_size).tolist()
        starts = [0] * (len(ends) - 1) if start_positions is None else alias(start_positions).tolist()
        position_t = torch.full((shape[0],), -1)
        for begin, end, first in zip(ends, ends[1:], starts, strict=False):
            index = torch.arange(end - begin)
            position_t[begin:end] = first + _position(index, end - begin, cp_size, cp_rank)
        return position_t
    length, batch = (shape[0], shape[1]) if format == "sbhd" else (shape[1], shape[0])
    position_s = _position(torch.arange(length), length, cp_size, cp_rank)
    starts_b = torch.zeros(batch, dtype=torch.int64) if start_positions is None else alias(start_positions)
    position_sb = position_s[:, None] + starts_b
    return position_sb if format == "sbhd" else position_sb.T


def rotate(x: Tensor, angle: Tensor, is_interleaved: bool, is_backward: bool) -> Tensor:
    """Rotate the first d2 channels of x [..., h, d] by the angles [..., d2]; the others do not change.

    The channels form pairs. A channel becomes cos times itself plus or minus sin times its partner. The
    backward pass is the transpose.
    """
    width = angle.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    weighted = part * sin if is_backward else part
    if is_interleaved:
        first, second = weighted[..., ::2], weighted[..., 1::2]
        turned = torch.stack([second, -first] if is_backward else [-second, first], -1).flatten(-2)
    else:
        first, second = weighted.chunk(2, -1)
        turned = torch.cat([second, -first] if is_backward else [-second, first], -1)
    return torch.cat([part * cos + (turned if is_backward else turned * sin), rest], -1)


def _apply(
    out: Tensor,
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    *,
    is_backward: bool,
) -> None:
    """`input`: [t, h, d], [s, b, h, d] or [b, s, h, d]. `freqs`: the angles, [positions, 1, 1, d2] in fp32.

    If `is_backward`, `input` and `out` are gradients.
    """
    format = qkv_format.name.removeprefix("NVTE_").lower()
    position = positions(input.shape, format, start_positions, cu_seqlens, cp_size, cp_rank)
    is_written = position >= 0  # False for a pack's tokens after its last sequence
    angle = alias(freqs)[position[is_written], 0, 0]
    alias(out)[is_written] = rotate(read_strided(input)[is_written], angle, interleaved, is_backward).to(
        out.dtype
    )


reference_of("fused_rope_forward", functools.partial(_apply, is_backward=False))
reference_of("fused_rope_backward", functools.partial(_apply, is_backward=True))
