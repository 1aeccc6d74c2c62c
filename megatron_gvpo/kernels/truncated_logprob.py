"""Log-probs over supports, the tokens that top-p, top-k and min-p allowed to be sampled.

A truncated token was drawn from the softmax over its support S alone. With z = X W^T / T

    logp = z[label] - log sum over S of e^z,    dL/dz_j = g (1[j = label] - p_j) - e p_j (log p_j + H)  in S,

and a token outside S has neither a logit nor a gradient. Most supports have a few members. Only their logits
are computed then, from the rows of W that they name: 6 h flops a member, where the whole vocabulary takes
6 h v a token. This is done in PyTorch, whatever the head's backend. A support with many members is cheaper in
the head's own products, where `Supports.hide_` takes all other logits out of a tile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gvpo.kernels.head import Backend, Head, checked_vocabulary
from megatron_gvpo.kernels.head_autograd import added, main_grad
from megatron_gvpo.kernels.linear_logprob import LinearLogprob, linear_logprob
from megatron_gvpo.kernels.mathematics import accumulator, entropy_of, logp_of
from megatron_gvpo.kernels.supports import HIDDEN, Supports
from megatron_gvpo.types import on_device

NARROW_SHARE, LEAST_NARROW = (
    1 / 256,
    32,
)  # default of `narrow`: a share of the vocabulary, but at least this number of tokens


def truncated_logprob(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    labels_r: Tensor,
    supports: Supports,
    *,
    temperature: float | Tensor = 1.0,
    weight_r: Tensor | None = None,
    entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    stash_bytes: int = 0,
    logits_bytes: int | None = None,
    backend: Backend = "auto",
    narrow: int | None = None,
    upstream: float | None = None,
) -> LinearLogprob:
    """Compute what `linear_logprob` computes, over the tokens that each label was sampled from.

    Args, beside those of `linear_logprob`:
        supports: of all r labels, each with its label, on hidden_rh's device; equal on all ranks of
            `tp_group`. A token without a support has the log-prob over the whole vocabulary.
        narrow: the most members of a support of which only the members' logits are computed; default 1/256
            of the vocabulary, and at least 32.

    Raises:
        ValueError: shapes, dtypes, sizes or backends that do not fit together.
    """
    if len(supports.count_r) != len(labels_r):
        raise ValueError(f"{len(supports.count_r)} supports for {len(labels_r)} labels: want one a label")
    vocab_size = checked_vocabulary(vocab_size, weight_vh, tp_group)
    most = max(LEAST_NARROW, int(vocab_size * NARROW_SHARE)) if narrow is None else narrow
    is_narrow_r = supports.narrow(most)

    def over_members(rows: _Rows) -> LinearLogprob:
        head = Head.of_shard(
            rows.hidden_rh,
            weight_vh,
            temperature=rows.temperature,
            tp_group=tp_group,
            vocab_size=vocab_size,
            logits_bytes=logits_bytes,
            entropy=entropy,
            backend=backend,
        )
        own_labels_r, own_supports = rows.labels_r - head.first_id, rows.supports.shifted(head.first_id)
        logp_r, entropy_r = OverSupports.apply(rows.hidden_rh, weight_vh, own_labels_r, own_supports, head)
        if rows.weight_r is None:
            return LinearLogprob(logp_r, entropy_r, mode="supports")
        surrogate = (rows.weight_r.detach() * logp_r).sum()
        entropy_r = None if entropy_r is None else entropy_r.detach()
        return LinearLogprob(logp_r.detach(), entropy_r, surrogate, "supports")

    def over_vocabulary(rows: _Rows) -> LinearLogprob:
        return linear_logprob(
            rows.hidden_rh,
            weight_vh,
            rows.labels_r,
            temperature=rows.temperature,
            weight_r=rows.weight_r,
            entropy=entropy,
            tp_group=tp_group,
            vocab_size=vocab_size,
            stash_bytes=stash_bytes,
            logits_bytes=logits_bytes,
            backend=backend,
            supports=rows.supports if rows.supports.count_r.any() else None,
            upstream=upstream,
        )

    rows = _Rows(hidden_rh, labels_r, supports, temperature, weight_r)
    if not is_narrow_r.any():
        return over_vocabulary(rows)
    if is_narrow_r.all():
        return over_members(rows)
    return _joined(over_vocabulary(rows.at(~is_narrow_r)), over_members(rows.at(is_narrow_r)), is_narrow_r)


@dataclass(frozen=True)
class _Rows:
    """The arguments of `truncated_logprob` that have an entry for each token."""

    hidden_rh: Tensor
    labels_r: Tensor
    supports: Supports
    temperature: float | Tensor
    weight_r: Tensor | None

    def at(self, is_chosen_r: Tensor) -> _Rows:
        """The tokens where `is_chosen_r`, bool [r] on the host, is true."""
        index_r = on_device(is_chosen_r.nonzero().flatten(), self.labels_r.device)
        temperature = self.temperature
        return _Rows(
            self.hidden_rh.index_select(0, index_r),
            self.labels_r[index_r],
            self.supports.select(is_chosen_r),
            temperature[index_r] if isinstance(temperature, Tensor) else temperature,
            None if self.weight_r is None else self.weight_r[index_r],
        )


def _joined(wide: LinearLogprob, narrow: LinearLogprob, is_narrow_r: Tensor) -> LinearLogprob:
    """The result of all tokens, from those of the tokens that are not narrow and of those that are."""
    parts = [on_device(mask.nonzero().flatten(), wide.logp_r.device) for mask in (~is_narrow_r, is_narrow_r)]

    def join(of_wide: Tensor, of_narrow: Tensor) -> Tensor:
        joined_r = of_wide.new_empty(len(is_narrow_r)).index_copy(0, parts[0], of_wide)
        return joined_r.index_copy(0, parts[1], of_narrow)

    entropy_r = surrogate = None
    if wide.entropy_r is not None and narrow.entropy_r is not None:
        entropy_r = join(wide.entropy_r, narrow.entropy_r)
    if wide.surrogate is not None and narrow.surrogate is not None:
        surrogate = wide.surrogate + narrow.surrogate
    return wide._replace(
        logp_r=join(wide.logp_r, narrow.logp_r),
        entropy_r=entropy_r,
        surrogate=surrogate,
        stash_share=wide.stash_share * len(wide.logp_r) / len(is_narrow_r),
    )


class OverSupports(torch.autograd.Function):
    """Computes logp and entropy of tokens that all have a support, differentiable in hidden_rh and weight_vh.

    It keeps one fp32 number for each member until the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, supports: Supports, head: Head
    ) -> tuple[Tensor, Tensor | None]:
        """`labels_r` and `supports` are in the columns of this rank's shard."""
        dtype, row_k = accumulator(weight_vh.dtype), supports.row_k
        is_owned_k = (supports.ids_k >= 0) & (supports.ids_k < head.columns)
        column_k = supports.ids_k.masked_fill(~is_owned_k, 0)
        z_k = hidden_rh.new_empty(len(row_k), dtype=dtype)
        for rows, members in _chunks(supports, hidden_rh, head.logits_bytes):
            w_kh = weight_vh.index_select(0, column_k[members]).to(dtype)
            x_kh = hidden_rh[rows].to(dtype).index_select(0, row_k[members] - rows.start)
            z_k[members] = w_kh.mul_(x_kh).sum(1)
        temperature = head.temperature
        z_k /= temperature[row_k] if isinstance(temperature, Tensor) else temperature
        z_k.masked_fill_(~is_owned_k, HIDDEN)
        is_label_k = is_owned_k & (supports.ids_k == labels_r[row_k])
        stats_sr = head.merge_over_tp(_statistics(z_k, is_label_k, supports, head.entropy))
        logp_r = logp_of(stats_sr)
        entropy_r = entropy_of(stats_sr) if head.entropy else None
        logp_k = z_k.sub_(stats_sr[0][row_k]).sub_(stats_sr[1].log()[row_k])
        ctx.save_for_backward(hidden_rh, weight_vh, logp_k, column_k, is_label_k, entropy_r)
        ctx.supports, ctx.head = supports, head
        ctx.set_materialize_grads(False)
        return logp_r, entropy_r

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_r: Tensor | None, e_r: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_rh, weight_vh, logp_k, column_k, is_label_k, entropy_r = ctx.saved_tensors
        supports, head = ctx.supports, ctx.head
        row_k, p_k = supports.row_k, logp_k.exp()
        d_k = torch.zeros_like(logp_k)
        if g_r is not None:
            d_k -= g_r[row_k] * torch.where(is_label_k, logp_k.expm1(), p_k)
        if e_r is not None and entropy_r is not None:
            d_k -= e_r[row_k] * p_k * (logp_k + entropy_r[row_k])
        temperature = head.temperature
        d_k /= temperature[row_k] if isinstance(temperature, Tensor) else temperature

        dx_rh = torch.empty_like(hidden_rh) if ctx.needs_input_grad[0] else None
        main_vh = main_grad(weight_vh) if ctx.needs_input_grad[1] else None
        dw_vh = main_vh
        if ctx.needs_input_grad[1] and main_vh is None:
            dw_vh = torch.zeros_like(weight_vh, dtype=d_k.dtype)
        for rows, members in _chunks(supports, hidden_rh, head.logits_bytes):
            d_kh = d_k[members, None]
            if dx_rh is not None:
                w_kh = weight_vh.index_select(0, column_k[members]).to(d_k.dtype)
                dx_rh[rows] = _sums(w_kh.mul_(d_kh), supports.count_r[rows]).to(dx_rh.dtype)
            if dw_vh is not None:
                x_kh = hidden_rh[rows].to(d_k.dtype).index_select(0, row_k[members] - rows.start)
                dw_vh.index_add_(0, column_k[members], x_kh.mul_(d_kh))
        if dw_vh is None:
            return dx_rh, None, None, None, None
        dw_vh = added(weight_vh) if main_vh is not None else dw_vh.to(weight_vh.dtype)
        return dx_rh, dw_vh, None, None, None


def _statistics(z_k: Tensor, is_label_k: Tensor, supports: Supports, entropy: bool) -> Tensor:
    """The statistics (mathematics.py) of this rank's part of each support, [s, r]."""
    counts = supports.count_r.to(z_k.device)
    max_r = torch.segment_reduce(z_k, "max", lengths=counts, unsafe=True)
    shifted_k = z_k - max_r[supports.row_k]
    power_k = shifted_k.exp()
    target_r = torch.segment_reduce(
        z_k.masked_fill(~is_label_k, -torch.inf), "max", lengths=counts, unsafe=True
    )
    stats = [max_r, _sums(power_k, counts), target_r]
    if entropy:
        stats.append(_sums(power_k.mul_(shifted_k), counts))
    return torch.stack(stats)


def _sums(values_k: Tensor, counts: Tensor) -> Tensor:
    """Return the sums of `counts` neighbours each, always added in the same order."""
    return torch.segment_reduce(values_k, "sum", lengths=counts.to(values_k.device), unsafe=True)


def _chunks(supports: Supports, hidden_rh: Tensor, chunk_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of tokens and of their members, such that two fp32 vectors for each member fit.

    A slice has at least one token, even if its members do not fit.
    """
    offsets, r = supports.offsets, len(supports.count_r)
    most = max(1, chunk_bytes // (2 * hidden_rh.shape[1] * accumulator(hidden_rh.dtype).itemsize))
    begin = 0
    while begin < r:
        end = max(begin + 1, bisect_right(offsets, offsets[begin] + most) - 1)
        yield slice(begin, end), slice(offsets[begin], offsets[end])
        begin = end
