"""The divergence of a student from a teacher over the whole vocabulary, without storing the logits.

The logits of both exist one tile of tokens at a time, in fp32. The weight of every token in the loss is known
before the forward, so the forward computes both gradients, as `WeightsFirst` does: 6 r h v flops, and
2 r h v of the teacher's h. It keeps nothing but the gradients, and takes one tile more than that mode.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gvpo.kernels.divergence import Divergence, merge_rest_, normalise_, statistics
from megatron_gvpo.kernels.head import Buffer, Head, length, longest
from megatron_gvpo.kernels.head_autograd import scaled_gradients
from megatron_gvpo.kernels.linear_logprob import own_columns, tile_bytes, tiles_of
from megatron_gvpo.kernels.mathematics import (
    accumulator,
    addmm_,
    logp_of,
    merge_statistics,
    operand,
    operand_dtype,
)


class TeacherLogits(NamedTuple):
    """The inputs of the teacher's logits; its h need not be the student's."""

    hidden_rh: Tensor  # [r, h], for the same tokens as the student's
    weight_vh: Tensor  # [v, h], rows of the same tokens as the student's shard, or fewer
    vocab_size: int  # entries of the whole vocabulary, not of this rank's shard


class LinearDivergence(NamedTuple):
    """The result of `linear_divergence`; tensors are fp32, or fp64 if the inputs are fp64."""

    divergence_r: Tensor  # in nats, detached
    logp_r: Tensor  # the student's log-probs of the labels, among all tokens that it has, detached
    surrogate: Tensor  # scalar sum(weight_r * divergence_r), differentiable


def linear_divergence(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    teacher: TeacherLogits,
    labels_r: Tensor,
    weight_r: Tensor,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    logits_bytes: int | None = None,
) -> LinearDivergence:
    """Compute `divergence` of softmax(hidden_rh @ weight_vh^T / temperature) from the teacher's, per token.

    Tokens that only one of the two has are left out of both distributions: no text has them.

    Only `surrogate` carries gradients: add it to the scalar that you call backward on. It backpropagates
    once. As with `linear_logprob`, the gradient of `hidden_rh` is this rank's part, and the gradient of
    `weight_vh` is added to its `main_grad` if Megatron's data parallelism gave it one. The teacher's inputs
    get none.

    Args:
        hidden_rh: [r, h] fp32, bf16 or fp64, equal on all ranks of `tp_group`. r = 0 is allowed.
        weight_vh: [v, h], same dtype. Rank i of `tp_group` holds rows i * v ... (i + 1) * v - 1.
        teacher: its hidden states and output weight, cut as `weight_vh` is.
        labels_r: int64 [r], global token ids, for `logp_r`.
        weight_r: [r], the weight of every token's divergence in the loss.
        divergence: which divergence (divergence.py).
        temperature: divides the logits of both.
        tp_group: the tensor-parallel group; it exchanges 32 bytes a token, with top_k 4 k + 8 more.
        vocab_size: rows of the student's whole vocabulary from here on are padding.
        logits_bytes: the most bytes of one tile of logits; there are two. Default as `linear_logprob`.

    Raises:
        ValueError: shapes or sizes that do not fit together.
    """
    tp_size, tp_rank = (tp_group.size(), tp_group.rank()) if tp_group is not None else (1, 0)
    shard = len(weight_vh)
    vocab_size = shard * tp_size if vocab_size is None else vocab_size
    columns = own_columns(vocab_size, shard, tp_rank)
    common = own_columns(min(vocab_size, teacher.vocab_size), shard, tp_rank)
    if len(teacher.hidden_rh) != len(hidden_rh) or len(teacher.weight_vh) < common:
        raise ValueError(
            f"the teacher has hidden states of {len(teacher.hidden_rh)} tokens and "
            f"{len(teacher.weight_vh)} rows of its output weight: want {len(hidden_rh)} tokens and at least "
            f"{common} rows"
        )
    head = Head(
        columns=columns,
        temperature=temperature,
        entropy=False,
        tp_group=tp_group if tp_size > 1 else None,
        logits_bytes=tile_bytes(hidden_rh) if logits_bytes is None else logits_bytes,
        stash_rows=0,
        stash_dtype=weight_vh.dtype,
        tiles=tiles_of("auto", weight_vh),
    )
    labels_r = labels_r - tp_rank * shard
    shared = TeacherLogits(teacher.hidden_rh.detach(), teacher.weight_vh[:common].detach(), common)
    return LinearDivergence(
        *_DivergenceFirst.apply(hidden_rh, weight_vh, shared, labels_r, weight_r.detach(), divergence, head)
    )


class _DivergenceFirst(torch.autograd.Function):
    """Computes the gradients of sum(weight_r * divergence_r) in the forward; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_rh: Tensor,
        weight_vh: Tensor,
        teacher: TeacherLogits,
        labels_r: Tensor,
        weight_r: Tensor,
        divergence: Divergence,
        head: Head,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulator(hidden_rh.dtype)
        factors = operand_dtype(weight_vh.dtype, weight_vh.device)
        common = len(teacher.weight_vh)
        x_rh, w_vh = operand(hidden_rh), operand(weight_vh[: head.columns])
        of_teacher_rh, of_teacher_vh = operand(teacher.hidden_rh), operand(teacher.weight_vh)
        # Count the padding too: all ranks need the same number of slices, because each has exchanges.
        slices = head.slices(len(hidden_rh), len(weight_vh), dtype.itemsize)
        own, other = (Buffer(hidden_rh, longest(slices) * n) for n in (head.columns, common))
        dx_rh = torch.zeros_like(hidden_rh, dtype=dtype) if ctx.needs_input_grad[0] else None
        dw_vh = torch.zeros_like(weight_vh, dtype=dtype) if ctx.needs_input_grad[1] else None
        result_sr = labels_r.new_zeros(2, len(labels_r), dtype=dtype)
        for rows in slices:
            z_rv = head.logits(own.tile(length(rows), head.columns), x_rh[rows], w_vh, rows)
            y_rv = head.logits(other.tile(length(rows), common), of_teacher_rh[rows], of_teacher_vh, rows)
            z_rv, only_rv = z_rv[:, :common], z_rv[:, common:]
            stats_sr = statistics(head, z_rv, labels_r[rows])
            only_sr = statistics(head, only_rv, labels_r[rows] - common)
            normalise_(z_rv, head.merge_over_tp(stats_sr))
            result_sr[1, rows] = logp_of(
                head.merge_over_tp(merge_statistics(torch.stack((stats_sr, only_sr))))
            )
            normalise_(y_rv, head.merge_over_tp(statistics(head, y_rv, labels_r[rows])))
            if divergence.top_k is not None:
                merge_rest_(head, z_rv, y_rv, divergence.top_k)
            sums_sr = divergence.statistics(z_rv, y_rv)
            if head.tp_group is not None:
                dist.all_reduce(sums_sr, group=head.tp_group)
            result_sr[0, rows] = sums_sr[0]
            if dx_rh is None and dw_vh is None:
                continue
            g_r = weight_r[rows].to(dtype) / head.temperature_of(rows)
            d_rv = divergence.gradient_(z_rv, y_rv, sums_sr, g_r).to(factors)
            if dx_rh is not None:
                addmm_(dx_rh[rows], d_rv, w_vh[:common], beta=0)
            if dw_vh is not None:
                addmm_(dw_vh[:common], d_rv.T, x_rh[rows])
        ctx.gradients, ctx.dtype, ctx.weight_vh = (dx_rh, dw_vh), hidden_rh.dtype, weight_vh
        divergence_r, logp_r = result_sr
        ctx.mark_non_differentiable(divergence_r, logp_r)
        return divergence_r, logp_r, (weight_r * divergence_r).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _divergence: None, _logp: None, g: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_gradients(ctx, g, "linear_divergence"), None, None, None, None, None
