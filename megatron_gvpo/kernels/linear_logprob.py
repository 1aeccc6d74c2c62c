"""Log-probs of given tokens straight from hidden states: the output layer without its logits.

With z = X W^T / T, logp = z[label] - logsumexp(z) and p = softmax(z), the gradient is (g, e: upstream
gradients of logp and entropy H)

    dL/dz_j = g (1[j = label] - p_j) - e p_j (log p_j + H),   dX = dZ W / T,   dW = dZ^T X / T.

The logits exist one tile at a time, in fp32, and become dZ in place. When the upstream gradient is
known only after the forward, the backward recomputes the tiles (8 r h v flops in all); a tile is then
all tokens by some columns, so that every row of W and of dW is visited once. When it is known before,
one pass does everything (6 r h v); that needs whole softmax rows, so a tile is some tokens by all columns.

Tiles of a shard and shards of a tensor-parallel group are the same thing: pieces of the vocabulary,
each with its softmax statistics, merged by the online softmax (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class LinearLogprob(NamedTuple):
    """What `linear_logprob` returns; fp32 (fp64 where the inputs are fp64)."""

    logp_r: Tensor  # detached where the weights were given
    entropy_r: Tensor | None = None  # where asked for; detached where the weights were given
    surrogate: Tensor | None = None  # scalar sum(weight_r * logp_r), where the weights were given


def linear_logprob(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    labels_r: Tensor,
    *,
    temperature: float = 1.0,
    weight_r: Tensor | None = None,
    entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    logits_bytes: int = 288 << 20,
) -> LinearLogprob:
    """log softmax(hidden_rh @ weight_vh^T / temperature)[labels_r], forward and backward without the logits.

    Without `weight_r`, `logp_r` (and `entropy_r`) are differentiable in `hidden_rh` and `weight_vh`.
    With `weight_r` = dL/dlogp, both gradients are computed in the forward, for 3/4 of the flops, and
    only `surrogate` carries them: add it to what you call backward on. It backpropagates once.
    Where no gradient is wanted (no_grad, frozen inputs) none is computed.

    The gradient of `hidden_rh` is this rank's part: the sum over `tp_group` is the gradient. The caller
    reduces it (Megatron: copy_to_tensor_model_parallel_region, or the sequence-parallel gather).

    Args:
        hidden_rh: [r, h] fp32, bf16 or fp64, of the positions that predict the labels; equal on all
            ranks of `tp_group`. r = 0 is allowed.
        weight_vh: [v, h], same dtype. Rank i of `tp_group` holds rows i * v ... (i + 1) * v - 1.
        labels_r: int64 [r], global token ids. A label outside the vocabulary has logp -inf.
        temperature: divides the logits.
        weight_r: [r] fp32, dL/dlogp.
        entropy: whether to compute the entropy of every row, in nats.
        tp_group: the tensor-parallel group; it exchanges 12 bytes a token (16 with entropy).
        vocab_size: rows of the whole vocabulary from here on are padding, and not part of the softmax.
        logits_bytes: the most that one tile of logits takes (one row or column at least).

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit together.
    """
    tp_size, tp_rank = (tp_group.size(), tp_group.rank()) if tp_group is not None else (1, 0)
    shard = weight_vh.shape[0]
    vocab_size = shard * tp_size if vocab_size is None else vocab_size
    _check(hidden_rh, weight_vh, labels_r, temperature, weight_r)
    if not 0 < vocab_size <= shard * tp_size:
        raise ValueError(f"vocab_size {vocab_size}: weight_vh has {tp_size} x {shard} rows over its group")
    head = _Head(
        columns=min(max(vocab_size - tp_rank * shard, 0), shard),
        temperature=temperature,
        entropy=entropy,
        tp_group=tp_group if tp_size > 1 else None,
        logits_bytes=logits_bytes,
    )
    labels_r = labels_r - tp_rank * shard
    differentiable = torch.is_grad_enabled() and (hidden_rh.requires_grad or weight_vh.requires_grad)
    if weight_r is not None and differentiable:
        return LinearLogprob(*_WeightsKnown.apply(hidden_rh, weight_vh, labels_r, weight_r.detach(), head))
    logp_r, entropy_r = _WeightsLate.apply(hidden_rh, weight_vh, labels_r, head)
    surrogate = None if weight_r is None else (weight_r.detach() * logp_r).sum()
    return LinearLogprob(logp_r, entropy_r, surrogate)


def _check(
    hidden_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, temperature: float, weight_r: Tensor | None
) -> None:
    if hidden_rh.dim() != 2 or weight_vh.dim() != 2 or hidden_rh.shape[1] != weight_vh.shape[1]:
        raise ValueError(
            f"hidden_rh {list(hidden_rh.shape)} and weight_vh {list(weight_vh.shape)}: want [r, h] and [v, h]"
        )
    if hidden_rh.dtype != weight_vh.dtype or hidden_rh.dtype not in _DTYPES:
        raise ValueError(
            f"hidden_rh is {hidden_rh.dtype} and weight_vh {weight_vh.dtype}: want the same, one of "
            f"{', '.join(map(str, _DTYPES))}"
        )
    if labels_r.shape != hidden_rh.shape[:1] or labels_r.dtype != torch.int64:
        raise ValueError(
            f"labels_r is {labels_r.dtype} {list(labels_r.shape)}: want torch.int64 [{len(hidden_rh)}]"
        )
    if weight_r is not None and weight_r.shape != hidden_rh.shape[:1]:
        raise ValueError(f"weight_r is {list(weight_r.shape)}: want [{len(hidden_rh)}], one a label")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: want a number above 0")


_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class _Head:
    """What both modes need besides the tensors."""

    columns: int  # rows of the shard that are tokens; the padding after them is never touched
    temperature: float
    entropy: bool
    tp_group: dist.ProcessGroup | None
    logits_bytes: int  # of one tile

    def slices(self, total: int, across: int, itemsize: int) -> list[slice]:
        """Slices of `total` such that a tile, one slice by `across` numbers, keeps to logits_bytes."""
        step = max(1, self.logits_bytes // (itemsize * max(across, 1)))
        if step > 16:
            step -= step % 16  # matrix products want aligned rows
        return [slice(start, min(start + step, total)) for start in range(0, total, step)]

    def logits(self, tile_rv: Tensor, x_rh: Tensor, w_vh: Tensor) -> Tensor:
        return _addmm_(tile_rv, x_rh, w_vh.T, beta=0, alpha=1 / self.temperature)

    def merge_over_tp(self, stats_sr: Tensor) -> Tensor:
        if self.tp_group is None or stats_sr.shape[1] == 0:
            return stats_sr
        stats_ksr = stats_sr.new_empty(self.tp_group.size(), *stats_sr.shape)
        dist.all_gather(list(stats_ksr), stats_sr, self.tp_group)
        return _merge(stats_ksr)


class _WeightsLate(torch.autograd.Function):
    """Keeps the softmax statistics of every token; the backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor | None]:
        dtype = _accumulator(hidden_rh.dtype)
        slices = head.slices(head.columns, len(hidden_rh), dtype.itemsize)
        tile_rv = hidden_rh.new_empty(len(hidden_rh), _longest(slices), dtype=dtype)
        x_rh = _operand(hidden_rh)
        stats_sr = _no_columns(labels_r, dtype, head.entropy)
        for columns in slices:
            z_rv = head.logits(tile_rv[:, : _length(columns)], x_rh, _operand(weight_vh[columns]))
            piece_sr = _exponentiate_(z_rv, labels_r - columns.start, head.entropy)
            stats_sr = _merge(torch.stack((stats_sr, piece_sr)))
        stats_sr = head.merge_over_tp(stats_sr)
        ctx.save_for_backward(hidden_rh, weight_vh, labels_r, stats_sr)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return _logp(stats_sr), _entropy(stats_sr) if head.entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_r: Tensor | None, e_r: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_rh, weight_vh, labels_r, stats_sr = ctx.saved_tensors
        head: _Head = ctx.head
        max_r, sum_r = stats_sr[0], stats_sr[1]
        g_r = torch.zeros_like(sum_r) if g_r is None else g_r / head.temperature
        # dZ = e^(z - max) (offset + slope (z - max)), but for the label's own g.
        offset_r, slope_r = -g_r / sum_r, None
        if e_r is not None:
            slope_r = -e_r / (sum_r * head.temperature)
            offset_r += slope_r * (_entropy(stats_sr) - sum_r.log())

        slices = head.slices(head.columns, len(hidden_rh), stats_sr.itemsize)
        tile_rv = stats_sr.new_empty(len(hidden_rh), _longest(slices))
        x_rh = _operand(hidden_rh)
        dx_rh = torch.zeros_like(hidden_rh, dtype=stats_sr.dtype) if ctx.needs_input_grad[0] else None
        dw_vh = torch.zeros_like(weight_vh) if ctx.needs_input_grad[1] else None
        for columns in slices:
            w_vh = _operand(weight_vh[columns])
            d_rv = head.logits(tile_rv[:, : _length(columns)], x_rh, w_vh).sub_(max_r[:, None])
            if slope_r is None:
                d_rv.exp_().mul_(offset_r[:, None])
            else:
                exp_rv = d_rv.exp()
                d_rv.mul_(slope_r[:, None]).add_(offset_r[:, None]).mul_(exp_rv)
            _add_at_labels_(d_rv, labels_r - columns.start, g_r)
            d_rv = _operand(d_rv, weight_vh.dtype)
            if dx_rh is not None:
                _addmm_(dx_rh, d_rv, w_vh)
            if dw_vh is not None:
                # All tokens are in this product, so it may be rounded to the weight's dtype.
                dw_vh[columns] = _addmm_(stats_sr.new_empty(w_vh.shape), d_rv.T, x_rh, beta=0)
        return None if dx_rh is None else dx_rh.to(hidden_rh.dtype), dw_vh, None, None


class _WeightsKnown(torch.autograd.Function):
    """Computes the gradients of sum(weight_r * logp_r) in the forward; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, weight_r: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        dtype = _accumulator(hidden_rh.dtype)
        x_rh, w_vh = _operand(hidden_rh), _operand(weight_vh[: head.columns])
        # By the whole shard, padding too: the ranks of a group must agree on the number of exchanges.
        slices = head.slices(len(hidden_rh), len(weight_vh), dtype.itemsize)
        tile_rv = hidden_rh.new_empty(_longest(slices), head.columns, dtype=dtype)
        dx_rh = torch.zeros_like(hidden_rh, dtype=dtype) if ctx.needs_input_grad[0] else None
        dw_vh = torch.zeros_like(weight_vh, dtype=dtype) if ctx.needs_input_grad[1] else None
        stats_sr = _no_columns(labels_r, dtype, head.entropy)
        for rows in slices:
            d_rv = head.logits(tile_rv[: _length(rows)], x_rh[rows], w_vh)
            piece_sr = _exponentiate_(d_rv, labels_r[rows], head.entropy)
            stats_sr[:, rows] = merged_sr = head.merge_over_tp(piece_sr)
            g_r = weight_r[rows].to(dtype) / head.temperature
            d_rv.mul_((-g_r * (piece_sr[0] - merged_sr[0]).exp() / merged_sr[1])[:, None])
            _add_at_labels_(d_rv, labels_r[rows], g_r)
            d_rv = _operand(d_rv, weight_vh.dtype)
            if dx_rh is not None:
                _addmm_(dx_rh[rows], d_rv, w_vh, beta=0)
            if dw_vh is not None:
                _addmm_(dw_vh[: head.columns], d_rv.T, x_rh[rows])
        ctx.gradients, ctx.dtype = (dx_rh, dw_vh), hidden_rh.dtype
        logp_r = _logp(stats_sr)
        entropy_r = _entropy(stats_sr) if head.entropy else None
        ctx.mark_non_differentiable(*[logp_r, entropy_r][: 1 + head.entropy])
        return logp_r, entropy_r, (weight_r * logp_r).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _logp: None, _entropy: None, g: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the surrogate of linear_logprob backpropagates once: its gradients are spent")
        dx_rh, dw_vh = [None if d is None else d.mul_(g).to(ctx.dtype) for d in ctx.gradients]
        ctx.gradients = None
        return dx_rh, dw_vh, None, None, None


# Softmax statistics, [s, r]: the largest logit; the sum of e^(z - largest); the label's logit (-inf where
# another piece has it); and, for the entropy, the sum of (z - largest) e^(z - largest).


def _no_columns(labels_r: Tensor, dtype: torch.dtype, entropy: bool) -> Tensor:
    """Statistics of no columns at all. The largest logit is finite, so that no inf - inf comes of it."""
    stats = [torch.finfo(dtype).min, 0.0, -torch.inf, 0.0][: 3 + entropy]
    return torch.tensor(stats, dtype=dtype, device=labels_r.device)[:, None].repeat(1, len(labels_r))


def _exponentiate_(z_rv: Tensor, labels_r: Tensor, entropy: bool) -> Tensor:
    """z_rv <- e^(z_rv - its row maximum). Returns the statistics of its columns."""
    if z_rv.shape[1] == 0:
        return _no_columns(labels_r, z_rv.dtype, entropy)
    index_r, owned_r = _locate(z_rv, labels_r)
    target_r = z_rv.gather(1, index_r[:, None])[:, 0].masked_fill(~owned_r, -torch.inf)
    max_r = z_rv.amax(1).clamp(min=torch.finfo(z_rv.dtype).min)
    z_rv.sub_(max_r[:, None])
    if not entropy:
        return torch.stack((max_r, z_rv.exp_().sum(1), target_r))
    shifted_rv = z_rv.clone()
    return torch.stack((max_r, z_rv.exp_().sum(1), target_r, shifted_rv.mul_(z_rv).sum(1)))


def _merge(stats_ksr: Tensor) -> Tensor:
    """Statistics of k pieces of the vocabulary -> statistics of the whole."""
    max_kr, sum_kr, target_kr = stats_ksr[:, 0], stats_ksr[:, 1], stats_ksr[:, 2]
    max_r = max_kr.amax(0)
    shift_kr = max_kr - max_r
    scale_kr = shift_kr.exp()
    merged = [max_r, (scale_kr * sum_kr).sum(0), target_kr.amax(0)]
    if stats_ksr.shape[1] == 4:
        merged.append((scale_kr * (stats_ksr[:, 3] + shift_kr * sum_kr)).sum(0))
    return torch.stack(merged)


def _logp(stats_sr: Tensor) -> Tensor:
    # Not target - logsumexp: near p = 1 that would round at the size of a logit, not of logp.
    return (stats_sr[2] - stats_sr[0]) - stats_sr[1].log()


def _entropy(stats_sr: Tensor) -> Tensor:
    return stats_sr[1].log() - stats_sr[3] / stats_sr[1]


def _locate(z_rv: Tensor, labels_r: Tensor) -> tuple[Tensor, Tensor]:
    """Column of every label, and whether it lies in this tile; a foreign label gets some valid column."""
    last = z_rv.shape[1] - 1
    return labels_r.clamp(0, last), (labels_r >= 0) & (labels_r <= last)


def _add_at_labels_(d_rv: Tensor, labels_r: Tensor, value_r: Tensor) -> None:
    """d_rv[i, labels_r[i]] += value_r[i] where the label lies in this tile; no host synchronisation."""
    if d_rv.shape[1] > 0:
        index_r, owned_r = _locate(d_rv, labels_r)
        d_rv.scatter_add_(1, index_r[:, None], value_r.masked_fill(~owned_r, 0)[:, None])


# Products: operands in the parameters' dtype on CUDA (tensor cores), results always in fp32. A CPU has no
# bf16 product with an fp32 result, so there the operands are converted.


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _operand(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    dtype = x.dtype if dtype is None else dtype
    return x.to(dtype if x.is_cuda else _accumulator(dtype))


def _addmm_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """out <- beta out + alpha a @ b, accumulated in out's dtype."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    return torch.addmm(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)


def _length(part: slice) -> int:
    return part.stop - part.start


def _longest(parts: list[slice]) -> int:
    return max(map(_length, parts), default=0)
