"""Reorders tokens by expert, and back. Source: transformer_engine/common/triton/permutation.py.

These kernels are written in Triton, and sort each token's experts with a sorting network. In Triton's
interpreter, which runs one program for each token, they took 98 % of the time of an update of a mixture of
experts. So they have references here, and a test compares the references with the interpreted kernels.

The row ids [tokens, 2 experts + 1] of a token have three parts: the numbers of its rows in the permuted
tensor, the largest first; from column `experts` on, the experts of these rows; and in the last column the
number of its rows. Entries of the first two parts beyond that number are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

Tensor = torch.Tensor
# A reference takes the number of programs along the grid's first dimension, and the arguments as CPU tensors.
KernelReference = Callable[[int, SimpleNamespace], None]
MODULE = "transformer_engine.common.triton.permutation"
KERNELS: dict[str, KernelReference] = {}  # by the names of the functions in that module


def _kernel(function: KernelReference) -> KernelReference:
    KERNELS[f"{function.__name__}_kernel"] = function
    return function


def _matrix(tensor: Tensor, rows: int, columns: int, row_stride: int, column_stride: int) -> Tensor:
    """Return a view with the strides that the kernel receives."""
    return tensor.as_strided((rows, columns), (row_stride, column_stride))


def _row_ids(tokens: int, of: SimpleNamespace) -> Tensor:
    strides = of.stride_row_id_map_token, of.stride_row_id_map_expert
    return _matrix(of.row_id_map_ptr, tokens, 2 * of.num_experts + 1, *strides)


def _routed(tokens: int, of: SimpleNamespace, offsets: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For n = 1, 2, ...: the tokens that have an n-th expert, their rows for that expert, and the experts.

    `offsets`: for each expert, the number of padding rows before its rows.
    """
    ids = _row_ids(tokens, of).long()
    steps = []
    for step in range(of.num_experts):
        token_s = (ids[:, -1] > step).nonzero()[:, 0]
        expert_s = ids[token_s, of.num_experts + step]
        row_s = ids[token_s, step]
        steps.append((token_s, row_s if offsets is None else row_s + offsets[expert_s].long(), expert_s))
    return steps


@_kernel
def _row_id_map_pass_1(experts: int, of: SimpleNamespace) -> None:
    """Number an expert's tokens within each block of tokens, from 1; 0 for a token of other experts."""
    strides = of.stride_routing_map_token, of.stride_routing_map_expert
    is_routed = _matrix(of.routing_map_ptr, of.num_tokens, experts, *strides).int()
    blocks = torch.nn.functional.pad(is_routed, (0, 0, 0, -of.num_tokens % of.BLOCK_SIZE))
    blocks = blocks.unflatten(0, (-1, of.BLOCK_SIZE))
    numbers = (blocks.cumsum(1) * blocks).flatten(0, 1)[: of.num_tokens]
    strides = of.stride_row_id_map_token, of.stride_row_id_map_expert
    _matrix(of.row_id_map_ptr, of.num_tokens, experts, *strides).copy_(numbers)
    of.workspace_ptr.view(-1)[: blocks.shape[0] * experts] = blocks.sum(1).T.flatten().int()


@_kernel
def _row_id_map_pass_2(experts: int, of: SimpleNamespace) -> None:
    """Replace the numbers within blocks by rows of the permuted tensor; -1 for a token of other experts."""
    strides = of.stride_row_id_map_token, of.stride_row_id_map_expert
    numbers = _matrix(of.row_id_map_ptr, of.num_tokens, experts, *strides)
    blocks = -(-of.num_tokens // of.BLOCK_SIZE)
    counts = of.workspace_ptr.view(-1)[: experts * blocks].long()
    begins = (counts.cumsum(0) - counts).view(experts, blocks).T
    begins = begins.repeat_interleave(of.BLOCK_SIZE, 0)[: of.num_tokens]
    numbers.copy_(torch.where(numbers == 0, -1, numbers + begins - 1))


@_kernel
def _row_id_map_pass_3(tokens: int, of: SimpleNamespace) -> None:
    """Sort each token's rows into the row ids that the module's docstring describes."""
    ids, experts = _row_ids(tokens, of), of.num_experts
    rows, indices = ids[:, :experts].sort(dim=1, descending=True)
    count = (rows != -1).sum(1, keepdim=True)
    is_routed = torch.arange(experts) < count
    ids[:, :experts] = torch.where(is_routed, rows, ids[:, :experts])
    ids[:, experts:-1] = torch.where(is_routed, indices.int(), ids[:, experts:-1])
    ids[:, -1:] = count.int()


@_kernel
def _permute(tokens: int, of: SimpleNamespace) -> None:
    """Copy each token's values into the rows of its experts, or zeros where the probability is 0."""
    strides = of.stride_input_token, of.stride_input_hidden
    values = _matrix(of.input_ptr, tokens, of.hidden_size, *strides)
    strides = of.stride_output_token, of.stride_output_hidden
    out = _matrix(of.output_ptr, of.num_out_tokens, of.hidden_size, *strides)
    if of.PERMUTE_PROBS:
        strides = of.stride_probs_token, of.stride_probs_expert
        probs = _matrix(of.probs_ptr, tokens, of.num_experts, *strides)
        permuted = of.permuted_probs_ptr.as_strided((of.num_out_tokens,), (of.stride_permuted_probs_token,))
    for token_s, row_s, expert_s in _routed(tokens, of, of.pad_offsets_ptr if of.FUSION_PAD else None):
        out[row_s] = values[token_s]
        if of.PERMUTE_PROBS:
            prob_s = probs[token_s, expert_s]
            permuted[row_s] = prob_s
            out[row_s[prob_s == 0]] = 0
        if of.PERMUTE_SCALE:
            width = of.scale_hidden_dim
            strides = of.stride_scale_token, of.stride_scale_hidden
            scales = _matrix(of.scale_ptr, tokens, width, *strides)
            strides = of.stride_permuted_scale_token, of.stride_permuted_scale_hidden
            _matrix(of.permuted_scale_ptr, of.num_out_tokens, width, *strides)[row_s] = scales[token_s]


@_kernel
def _unpermute(tokens: int, of: SimpleNamespace) -> None:
    """Sum each token's rows in fp32, weighted if there are weights, and copy their probabilities back."""
    strides = of.stride_input_token, of.stride_input_hidden
    values = _matrix(of.input_ptr, len(of.input_ptr), of.hidden_size, *strides)
    total = torch.zeros(tokens, of.hidden_size)
    if of.PERMUTE_PROBS:
        strides = of.stride_unpermuted_probs_token, of.stride_unpermuted_probs_expert
        probs = _matrix(of.unpermuted_probs_ptr, tokens, of.num_experts, *strides)
        probs.zero_()
        permuted = of.permuted_probs_ptr.as_strided((len(values),), (of.stride_permuted_probs_token,))
    for token_s, row_s, expert_s in _routed(tokens, of, of.pad_offsets_ptr if of.FUSION_UNPAD else None):
        part = values[row_s].float()
        if of.WITH_MERGING_PROBS:
            part = part * _merging(tokens, of)[token_s, expert_s, None]
        total[token_s] += part
        if of.PERMUTE_PROBS:
            probs[token_s, expert_s] = permuted[row_s]
    strides = of.stride_output_token, of.stride_output_hidden
    _matrix(of.output_ptr, tokens, of.hidden_size, *strides).copy_(total.to(values.dtype))


def _merging(tokens: int, of: SimpleNamespace) -> Tensor:
    """Return the weights [tokens, experts] of each token's experts, in fp32."""
    strides = of.stride_merging_probs_token, of.stride_merging_probs_expert
    return _matrix(of.merging_probs_ptr, tokens, of.num_experts, *strides).float()


@_kernel
def _unpermute_bwd_with_merging_probs(tokens: int, of: SimpleNamespace) -> None:
    """Compute the gradients of the rows, and of the weights; 0 for experts that the token does not use."""
    strides = of.stride_fwd_output_grad_token, of.stride_fwd_output_grad_hidden
    grads = _matrix(of.fwd_output_grad_ptr, tokens, of.hidden_size, *strides)
    strides = of.stride_fwd_input_token, of.stride_fwd_input_hidden
    values = _matrix(of.fwd_input_ptr, len(of.fwd_input_ptr), of.hidden_size, *strides)
    strides = of.stride_fwd_input_grad_token, of.stride_fwd_input_grad_hidden
    value_grads = _matrix(of.fwd_input_grad_ptr, len(values), of.hidden_size, *strides)
    strides = of.stride_merging_probs_grad_token, of.stride_merging_probs_grad_expert
    prob_grads = _matrix(of.merging_probs_grad_ptr, tokens, of.num_experts, *strides)
    prob_grads.zero_()
    merging = _merging(tokens, of)
    for token_s, row_s, expert_s in _routed(tokens, of, of.pad_offsets_ptr if of.FUSION_UNPAD else None):
        grad = grads[token_s].float()
        value_grads[row_s] = (grad * merging[token_s, expert_s, None]).to(value_grads.dtype)
        prob_grads[token_s, expert_s] = (values[row_s].float() * grad).sum(1).to(prob_grads.dtype)


@_kernel
def _make_chunk_sort_map(tokens: int, of: SimpleNamespace) -> None:
    """Compute the new row of each token when the chunks of tokens are put into another order.

    Rows after the last chunk keep their positions.
    """
    sizes = of.split_sizes_ptr.view(-1)[: of.num_splits].long()
    order = of.sorted_indices_ptr.view(-1)[: of.num_splits].long()
    ends, own = sizes.cumsum(0), torch.arange(tokens)
    chunk = torch.searchsorted(ends, own, right=True)
    chunk_after = (order == chunk[:, None]).int().argmax(1)
    begins = sizes[order].cumsum(0) - sizes[order]
    known = chunk.clamp(max=of.num_splits - 1)
    moved = begins[chunk_after] + own - (ends[known] - sizes[known])
    of.dst_rows_ptr.view(-1)[:tokens] = torch.where(own < ends[-1], moved, own).int()


@_kernel
def _sort_chunks_by_map(tokens: int, of: SimpleNamespace) -> None:
    strides = of.stride_input_token, of.stride_input_hidden
    values = _matrix(of.input_ptr, tokens, of.hidden_size, *strides)
    strides = of.stride_output_token, of.stride_output_hidden
    out = _matrix(of.output_ptr, tokens, of.hidden_size, *strides)
    own, mapped = torch.arange(tokens), of.row_id_map_ptr.view(-1)[:tokens].long()
    source, target = (own, mapped) if of.FORWARD else (mapped, own)
    out[target] = values[source]
    if of.PERMUTE_PROBS:
        probs = of.probs_ptr.as_strided((tokens,), (of.stride_probs_token,))
        of.permuted_probs_ptr.as_strided((tokens,), (of.stride_permuted_probs_token,))[target] = probs[source]
