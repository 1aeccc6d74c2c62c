"""Packs to padded ones and back. Source: common/fused_attn/utils.cu and common/util/padding.cu."""

from __future__ import annotations

import itertools

import torch

from megatron_gvpo.emulation.memory import alias
from megatron_gvpo.emulation.transformer_engine.references import reference

Tensor = torch.Tensor


@reference
def convert_thd_to_bshd(result: Tensor, packed: Tensor, cu_seqlens: Tensor, *_: int) -> None:
    """[t, h, d] to [b, s, h, d], with zeros behind each sequence."""
    ends, from_t, to_bs = alias(cu_seqlens).tolist(), alias(packed), alias(result)
    to_bs.zero_()
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        to_bs[row, : end - begin] = from_t[begin:end]


@reference
def convert_bshd_to_thd(result: Tensor, padded: Tensor, cu_seqlens: Tensor, *_: int) -> None:
    """[b, s, h, d] to [t, h, d]; tokens behind the last sequence are zeros."""
    ends, from_bs, to_t = alias(cu_seqlens).tolist(), alias(padded), alias(result)
    to_t.zero_()
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        to_t[begin:end] = from_bs[row, : end - begin]


@reference
def fused_multi_row_padding(
    result: None, input: Tensor, output: Tensor, input_row_list: list[int], padded_input_row_list: list[int]
) -> None:
    """Rows of experts, one after the other, with zeros behind each expert's."""
    parts, padded = alias(input).split(input_row_list), alias(output).split(padded_input_row_list)
    for part, target in zip(parts, padded, strict=True):
        target.zero_()
        target[: len(part)] = part


@reference
def fused_multi_row_unpadding(
    result: None, input: Tensor, output: Tensor, input_row_list: list[int], unpadded_input_row_list: list[int]
) -> None:
    """The rows of experts without what stands behind them."""
    parts, plain = alias(input).split(input_row_list), alias(output).split(unpadded_input_row_list)
    for part, target in zip(parts, plain, strict=True):
        target.copy_(part[: len(target)])
