"""The divergence of a student from a teacher over the whole vocabulary, without storing the logits.

The logits of student and teacher exist one tile of tokens at a time, in fp32. The weight of every token in
the loss is known before the forward, so the forward computes both gradients, as `WeightsFirst` does, from
chunks of dL/dz in the dtype of the products' operands. It takes 6 r h v flops for the student, and 2 r h v
with the teacher's h. It keeps nothing but the gradients, and needs memory for one tile more than
`WeightsFirst`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gvpo.kernels.divergence import Divergence, merge_rest_, normalise_, statistics
from megatron_gvpo.kernels.head import Buffer, Head, length, longest
from megatron_gvpo.kernels.head_autograd import KnownGradients
from megatron_gvpo.kernels.mathematics import accumulator, logp_of, merge_statistics, operand
from megatron_gvpo.kernels.stash import RowProducts


class TeacherLogits(NamedTuple):
    """The inputs of the teacher's logits; its h need not be the student's."""

    hidden_rh: Tensor  # [r, h], for the same tokens as the student's
    weight_vh: Tensor  # [v, h], rows of the same tokens as the student's shard, or fewer
    vocab_size: int  # entries of the whole vocabulary, not of this rank's shard


class LinearDivergence(NamedTuple):
    """The result of `linear_divergence`; tensors are fp32, or fp64 if the inputs are fp64."""

    divergence_r: Tensor  # in nats, detached
    logp_r: Tensor  # the student's log-probs of the labels, over its whole vocabulary, detached
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
    stash_dtype: torch.dtype | None = None,
    upstream: float | None = None,
) -> LinearDivergence:
    """Compute `divergence` of softmax(hidden_rh @ weight_vh^T / temperature) from the teacher's, per token.

    Tokens that only one of the two models has are left out of both distributions, because no text contains
    them.

    Only `surrogate` carries gradients: add it to the scalar that you call backward on. `surrogate` can be
    backpropagated once. As with `linear_logprob`, the gradient of `hidden_rh` is this rank's part, and the
    gradient of `weight_vh` is added to its `main_grad` if Megatron's data parallelism gave it one. The
    teacher's inputs get none.

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
        logits_bytes: the most bytes of one of the two tiles of logits; default as `linear_logprob`.
        stash_dtype: of dL/dz between its computation and the products, as for `linear_logprob`.
        upstream: as for `linear_logprob`.

    Raises:
        ValueError: shapes or sizes that do not fit together.
        RuntimeError: in the backward, if `surrogate` has another factor than `upstream`.
    """
    head = Head.of_shard(
        hidden_rh,
        weight_vh,
        temperature=temperature,
        tp_group=tp_group,
        vocab_size=vocab_size,
        logits_bytes=logits_bytes,
        stash_dtype=stash_dtype,
    )
    common = min(head.columns, max(teacher.vocab_size - head.first_id, 0))
    if len(teacher.hidden_rh) != len(hidden_rh) or len(teacher.weight_vh) < common:
        raise ValueError(
            f"the teacher has hidden states of {len(teacher.hidden_rh)} tokens and "
            f"{len(teacher.weight_vh)} rows of its output weight: want {len(hidden_rh)} tokens and at least "
            f"{common} rows"
        )
    labels_r = labels_r - head.first_id
    shared = TeacherLogits(teacher.hidden_rh.detach(), teacher.weight_vh[:common].detach(), common)
    return LinearDivergence(
        *_DivergenceFirst.apply(
            hidden_rh, weight_vh, shared, labels_r, weight_r.detach(), divergence, head, upstream
        )
    )


class _DivergenceFirst(torch.autograd.Function):
    """Computes the gradients of sum(weight_r * divergence_r) in the forward; the backward returns them."""

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
        upstream: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, common = accumulator(hidden_rh.dtype), len(teacher.weight_vh)
        tiles = _Tiles(head, divergence, operand(weight_vh[: head.columns]), operand(teacher.weight_vh))
        gradients = KnownGradients(hidden_rh, weight_vh, ctx.needs_input_grad, upstream)
        # Count the padding too: all ranks need the same number of tiles, because each has exchanges.
        chunks = head.chunks(len(hidden_rh), len(weight_vh), dtype)
        in_place = head.stash_dtype == dtype
        buffer = Buffer(hidden_rh, 0 if in_place else longest(chunks) * common, head.stash_dtype)
        result_sr = labels_r.new_zeros(2, len(labels_r), dtype=dtype)
        for chunk in chunks:
            x_rh, y_rh = operand(hidden_rh[chunk]), operand(teacher.hidden_rh[chunk])
            g_r = weight_r[chunk].to(dtype) * (gradients.factor / head.temperature_of(chunk))
            d_rv = None if in_place else buffer.tile(length(chunk), common)
            for rows in head.slices(length(chunk), len(weight_vh), dtype.itemsize):
                of_head = slice(chunk.start + rows.start, chunk.start + rows.stop)
                result_sr[:, of_head], tile_rv = tiles.compute(
                    x_rh[rows], y_rh[rows], labels_r[of_head], g_r[rows], of_head, gradients.are_wanted
                )
                if d_rv is None:  # the chunk is this tile
                    d_rv = tile_rv
                else:
                    d_rv[rows] = tile_rv
            if gradients.are_wanted and d_rv is not None:
                gradients.add(chunk, common, RowProducts(head, d_rv, x_rh, None), tiles.w_vh)
        ctx.gradients = gradients
        divergence_r, logp_r = result_sr
        ctx.mark_non_differentiable(divergence_r, logp_r)
        return divergence_r, logp_r, (weight_r * divergence_r).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _divergence: None, _logp: None, g: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.gradients.take(g, "linear_divergence"), *[None] * 6


class _Tiles:
    """Computes a tile of both models' logits, in memory that is used again for the next tile."""

    def __init__(self, head: Head, divergence: Divergence, w_vh: Tensor, of_teacher_vh: Tensor) -> None:
        self._head, self._divergence = head, divergence
        self.w_vh, self._of_teacher_vh = w_vh, of_teacher_vh
        self._buffers: tuple[Buffer, Buffer] | None = None

    def compute(
        self, x_rh: Tensor, y_rh: Tensor, labels_r: Tensor, g_r: Tensor, rows: slice, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the rows' divergences and labels' log-probs [2, r], and g dD/dz [r, v] of both's tokens."""
        head, divergence, common = self._head, self._divergence, len(self._of_teacher_vh)
        if self._buffers is None:  # the first tile is the largest
            self._buffers = Buffer(x_rh, len(x_rh) * head.columns), Buffer(x_rh, len(x_rh) * common)
        own, other = self._buffers
        z_rv = head.logits(own.tile(len(x_rh), head.columns), x_rh, self.w_vh, rows)
        t_rv = head.logits(other.tile(len(x_rh), common), y_rh, self._of_teacher_vh, rows)
        z_rv, only_rv = z_rv[:, :common], z_rv[:, common:]
        stats_sr = statistics(head, z_rv, labels_r)
        only_sr = statistics(head, only_rv, labels_r - common)
        normalise_(z_rv, head.merge_over_tp(stats_sr))
        logp_r = logp_of(head.merge_over_tp(merge_statistics(torch.stack((stats_sr, only_sr)))))
        normalise_(t_rv, head.merge_over_tp(statistics(head, t_rv, labels_r)))
        if divergence.top_k is not None:
            merge_rest_(head, z_rv, t_rv, divergence.top_k)
        sums_sr = divergence.statistics(z_rv, t_rv)
        if head.tp_group is not None:
            dist.all_reduce(sums_sr, group=head.tp_group)
        if with_gradient:
            divergence.gradient_(z_rv, t_rv, sums_sr, g_r)
        return torch.stack((sums_sr[0], logp_r)), z_rv
