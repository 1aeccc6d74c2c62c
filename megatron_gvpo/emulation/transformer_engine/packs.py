"""Conversions between packed and padded sequences, and packs that context parallelism divides among ranks.

In a divided pack each rank has two chunks of every sequence, one directly after the other, which are called
the halves of the rank's sequence. Attention runs in steps, one for each rank's keys, and adds up their
results. `cu_seqlens` [b + 1] int32 has the sequences' ends: in the rank's own tokens, or in the tokens of all
ranks if the function takes the number of ranks. `lse` is the log-sum-exp of the attention scores, [h, t] in a
pack. Sources: common/fused_attn/utils.cu and context_parallel.cu, common/util/padding.cu.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from megatron_gvpo.emulation.transformer_engine.references import read, reference
from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Tensor = torch.Tensor


@reference
def convert_thd_to_bshd(result: Tensor, packed: Tensor, cu_seqlens: Tensor, *_: int) -> None:
    """Copy packed [t, h, d] to padded [b, s, h, d], with zeros after each sequence."""
    ends, from_t, to_bs = alias(cu_seqlens).tolist(), alias(packed), alias(result)
    to_bs.zero_()
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        to_bs[row, : end - begin] = from_t[begin:end]


@reference
def convert_bshd_to_thd(result: Tensor, padded: Tensor, cu_seqlens: Tensor, *_: int) -> None:
    """Copy padded [b, s, h, d] to packed [t, h, d]; tokens after the last sequence are zeros."""
    ends, from_bs, to_t = alias(cu_seqlens).tolist(), alias(padded), alias(result)
    to_t.zero_()
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        to_t[begin:end] = from_bs[row, : end - begin]


@reference
def fused_multi_row_padding(
    result: None, input: Tensor, output: Tensor, input_row_list: list[int], padded_input_row_list: list[int]
) -> None:
    """Copy the rows of all experts, one expert after the other, and add zeros after each expert's rows."""
    parts, padded = alias(input).split(input_row_list), alias(output).split(padded_input_row_list)
    for part, target in zip(parts, padded, strict=True):
        target.zero_()
        target[: len(part)] = part


@reference
def fused_multi_row_unpadding(
    result: None, input: Tensor, output: Tensor, input_row_list: list[int], unpadded_input_row_list: list[int]
) -> None:
    """Copy the rows of all experts without the padding after each expert's rows."""
    parts, plain = alias(input).split(input_row_list), alias(output).split(unpadded_input_row_list)
    for part, target in zip(parts, plain, strict=True):
        target.copy_(part[: len(target)])


def half_indices(cu_seqlens: Tensor, half: int) -> Tensor:
    """Return the indices of the tokens in the first (0) or second (1) halves of all sequences."""
    parts = [
        torch.arange(begin + half * (end - begin) // 2, begin + (half + 1) * (end - begin) // 2)
        for begin, end in _bounds(cu_seqlens)
    ]
    return torch.cat(parts)


def _bounds(cu_seqlens: Tensor) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(alias(cu_seqlens).tolist())


def _packed(name: str, is_packed: bool) -> None:
    if not is_packed:
        raise NotImplementedError(f"{name} with statistics of padded sequences")


@reference
def thd_read_half_tensor(result: Tensor, tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> None:
    """Copy one half of each sequence of `tensor` [t, h, d] or [2, t, h, d]."""
    index = half_indices(cu_seqlens, half_idx)
    alias(result).narrow(-3, 0, len(index)).copy_(alias(tensor).index_select(-3, index))


@reference
def thd_second_half_lse_correction(
    result: None, lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool
) -> None:
    """Add a step's sums of exponentials to those of the second halves, in place; all are logarithms."""
    _packed("thd_second_half_lse_correction", lse_packed)
    index = half_indices(cu_seqlens, 1)
    lse_ht = alias(lse)
    lse_ht[:, index] = torch.logaddexp(lse_ht[:, index], alias(lse_per_step)[:, : len(index)])


@reference
def thd_read_second_half_lse(
    result: Tensor, lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> None:
    """Copy the second halves of `lse` to [h, second_half_lse_seqlen], with zeros after them."""
    _packed("thd_read_second_half_lse", lse_packed)
    index = half_indices(cu_seqlens, 1)
    half = alias(result)
    half.zero_()
    half[:, : len(index)] = alias(lse)[:, index]


@reference
def thd_out_correction(
    result: None,
    out: Tensor,
    out_per_step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add a step's outputs [t, h, d] in place, each weighted by its share of the softmax' denominator."""
    _packed("thd_out_correction", lse_packed)
    total = alias(cu_seqlens)[-1].item()
    index = half_indices(cu_seqlens, 1) if only_second_half else torch.arange(total)
    heads = old_lse.shape[0]
    out_thd = alias(out).view(-1, heads, out.shape[-1] if out.dim() == 3 else out.shape[-1] // heads)
    step_thd = read(out_per_step).view(-1, *out_thd.shape[1:])[: len(index)]
    new_th1 = alias(lse)[:, index].T[..., None]
    before = torch.exp(alias(old_lse)[:, index].T[..., None] - new_th1)
    step = torch.exp(alias(lse_per_step)[:, : len(index)].T[..., None] - new_th1)
    old_thd = out_thd[index].float()
    # Zeros stay zero whatever their weight, since the weight of padding comes from memory that was not
    # written.
    added = torch.where(old_thd == 0, 0.0, old_thd * before) + torch.where(
        step_thd == 0, 0.0, step_thd * step
    )
    out_thd[index] = added.to(out.dtype)


@reference
def thd_grad_correction(
    result: None, grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Add or copy a step's gradients into the halves of `grad` [t, h, d] or [2, t, h, d], in place.

    If `first_half` or `second_half` is "none", `grad_per_step` has only the other half.
    """
    orders = {0: first_half, 1: second_half}
    is_half = "none" in orders.values()
    grad_thd, step_thd = alias(grad), alias(grad_per_step)
    for half, order in orders.items():
        if order == "none":
            continue
        index = half_indices(cu_seqlens, half)
        values = step_thd.narrow(-3, 0, len(index)) if is_half else step_thd.index_select(-3, index)
        if order == "add":
            values = (grad_thd.index_select(-3, index).float() + values.float()).to(grad.dtype)
        grad_thd.index_copy_(grad.dim() - 3, index, values)


def partition(cu_seqlens: Tensor, world_size: int, rank: int) -> Tensor:
    """Return the indices of a rank's tokens: of 2 x world_size chunks a sequence, one from either end."""
    parts = []
    for begin, end in _bounds(cu_seqlens):
        chunk = (end - begin) // (2 * world_size)
        for number in (rank, 2 * world_size - 1 - rank):
            parts.append(torch.arange(begin + number * chunk, begin + (number + 1) * chunk))
    return torch.cat(parts)


@reference
def thd_get_partitioned_indices(
    result: Tensor, cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> None:
    """Write the indices of the rank's tokens, int32 [total_tokens / world_size]."""
    index = partition(cu_seqlens, world_size, rank)
    alias(result)[: len(index)] = index.to(result.dtype)


@reference
def thd_sequence_order_to_cp_rank_order(
    result: Tensor, inp: Tensor, cu_seqlens: Tensor, cp_size: int, total_tokens: int
) -> None:
    """Reorder tokens [t, ...] from the order of the sequences to that of the ranks, rank after rank."""
    order = torch.cat([partition(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    alias(result)[: len(order)] = alias(inp)[order]


@reference
def thd_cp_rank_order_to_sequence_order(
    result: Tensor, inp: Tensor, cu_seqlens: Tensor, cp_size: int, total_tokens: int
) -> None:
    """Reorder tokens [t, ...] from the order of the ranks, one after another, to that of the sequences."""
    order = torch.cat([partition(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    alias(result)[order] = alias(inp)[: len(order)]


@reference
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    result: None, out: Tensor, inp: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor
) -> None:
    """Copy each sequence's tokens without its padding, in place."""
    for (begin, _), (first, end) in zip(_bounds(cu_seqlens_padded), _bounds(cu_seqlens), strict=True):
        alias(out)[begin : begin + end - first] = alias(inp)[begin : begin + end - first]
