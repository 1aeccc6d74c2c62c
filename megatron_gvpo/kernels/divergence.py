"""The tile operations of linear_divergence.py: from two tiles of logits to divergences and their gradient.

A tile is some tokens (rows) by all columns of this rank's shard. Work that needs memory of its own goes over
a tile in blocks of rows, so that it takes a small part of a tile.

With p = softmax(z) of the student, t = softmax(y) of the teacher and m = beta t + (1 - beta) p:

    forward   D = KL(t || p)                    dD/dz_j = p_j - t_j
    reverse   D = KL(p || t)                    dD/dz_j = p_j (log(p_j / t_j) - D)
    js        D = beta KL(t || m) + (1 - beta) K,  K = KL(p || m)
                                                dD/dz_j = (1 - beta) p_j (log(p_j / m_j) - K)

`js` is the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649 eq. 1; there P is the teacher).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.kernels.head import Head

Kind = Literal["forward", "reverse", "js"]

_BLOCKS = 16  # blocks into which a tile is cut


@dataclass(frozen=True)
class Divergence:
    """A divergence of the student's distributions from the teacher's.

    `top_k`: only the teacher's k likeliest tokens (and those that tie with the last of them) count by
    themselves; all others count as one token, with the sum of their probabilities. The result is at most the
    divergence of all tokens, 0 if the distributions are equal, and never negative. None: of all tokens.
    """

    kind: Kind
    beta: float = 0.5  # only `js` reads it
    top_k: int | None = None

    def statistics(self, logp_rv: Tensor, teacher_rv: Tensor) -> Tensor:
        """Return this shard's summands [s, r]: the divergence, with `js` also KL(p || m)."""

        def block(a_rv: Tensor, b_rv: Tensor) -> Tensor:
            if self.kind == "forward":
                return (b_rv.exp().mul_(b_rv - a_rv)).sum(1)[None]
            if self.kind == "reverse":
                return (a_rv.exp().mul_(a_rv - b_rv)).sum(1)[None]
            m_rv = self._mixture(a_rv, b_rv)
            of_student_r = (a_rv - m_rv).mul_(a_rv.exp()).sum(1)
            of_teacher_r = m_rv.neg_().add_(b_rv).mul_(b_rv.exp()).sum(1)
            return torch.stack((self.beta * of_teacher_r + (1 - self.beta) * of_student_r, of_student_r))

        return _in_blocks(block, logp_rv, teacher_rv)

    def gradient_(self, logp_rv: Tensor, teacher_rv: Tensor, sums_sr: Tensor, g_r: Tensor) -> Tensor:
        """logp_rv <- g dD/dz, given the sums of `statistics` over the vocabulary."""

        def block(a_rv: Tensor, b_rv: Tensor, mean_r: Tensor, g_r: Tensor) -> None:
            if self.kind == "forward":
                a_rv.exp_().sub_(b_rv.exp()).mul_(g_r[:, None])
                return
            p_rv = a_rv.exp()
            if self.kind == "reverse":
                a_rv.sub_(b_rv)
            else:
                a_rv.sub_(self._mixture(a_rv, b_rv))
                g_r = (1 - self.beta) * g_r
            a_rv.sub_(mean_r[:, None]).mul_(p_rv).mul_(g_r[:, None])

        step = _step(logp_rv)
        parts = (x.split(step) for x in (logp_rv, teacher_rv, sums_sr[-1], g_r))
        for part in zip(*parts, strict=True):
            block(*part)
        return logp_rv

    def _mixture(self, logp_rv: Tensor, teacher_rv: Tensor) -> Tensor:
        """Return log m."""
        return torch.logaddexp(teacher_rv + log(self.beta), logp_rv + log(1 - self.beta))


def statistics(head: Head, z_rv: Tensor, labels_r: Tensor) -> Tensor:
    """Return the statistics (mathematics.py) of the columns of z_rv, which stays as it is."""
    labels = iter(labels_r.split(_step(z_rv)))
    return _in_blocks(lambda part_rv: head.tiles.statistics_(part_rv.clone(), next(labels), False), z_rv)


def normalise_(z_rv: Tensor, stats_sr: Tensor) -> None:
    """z_rv <- log softmax(z), given the statistics of the whole vocabulary."""
    z_rv.sub_(stats_sr[0][:, None]).sub_(stats_sr[1].log()[:, None])


def merge_rest_(head: Head, logp_rv: Tensor, teacher_rv: Tensor, top_k: int) -> None:
    """Change the teacher's log-probs of tokens that are not among its `top_k` likeliest.

    They become the student's log-probs, shifted such that they have the teacher's sum of probabilities, P_t:
    with log t_j = log p_j + log P_t - log P_s, all terms of these tokens in a divergence add up to that of
    one token with the probabilities P_s and P_t, and so does its gradient.
    """
    least_r = _kth_largest(head, teacher_rv, top_k)
    step = _step(logp_rv)

    def rest(a_rv: Tensor, b_rv: Tensor, least_r: Tensor) -> Tensor:
        among_rv = b_rv >= least_r[:, None]
        return torch.stack([_log_sum(x_rv.masked_fill(among_rv, -torch.inf)) for x_rv in (a_rv, b_rv)])

    thresholds = iter(least_r.split(step))
    rest_sr = _in_blocks(lambda a_rv, b_rv: rest(a_rv, b_rv, next(thresholds)), logp_rv, teacher_rv)
    if head.tp_group is not None:
        rest_ksr = rest_sr.new_empty(head.tp_group.size(), *rest_sr.shape)
        dist.all_gather(list(rest_ksr), rest_sr, head.tp_group)
        rest_sr = rest_ksr.logsumexp(0)
    shift_r = rest_sr[1] - rest_sr[0]  # nan where there is no other token
    for a_rv, b_rv, least, shift in zip(
        *(x.split(step) for x in (logp_rv, teacher_rv, least_r, shift_r)), strict=True
    ):
        b_rv.copy_(torch.where(b_rv >= least[:, None], b_rv, a_rv + shift[:, None]))


def _kth_largest(head: Head, x_rv: Tensor, k: int) -> Tensor:
    """Return the k-th largest number of each row over all shards, [r]; -inf where there are fewer than k."""
    own = min(k, x_rv.shape[1])
    best_rk = x_rv.new_full((len(x_rv), k), -torch.inf)
    best_rk[:, :own] = x_rv.topk(own, 1, sorted=False).values
    if head.tp_group is not None:
        shards = [torch.empty_like(best_rk) for _ in range(head.tp_group.size())]
        dist.all_gather(shards, best_rk, head.tp_group)
        best_rk = torch.cat(shards, 1).topk(k, 1).values
    return best_rk.amin(1)


def _log_sum(x_rv: Tensor) -> Tensor:
    return x_rv.logsumexp(1) if x_rv.shape[1] else x_rv.new_full((len(x_rv),), -torch.inf)


def _step(x_rv: Tensor) -> int:
    return max(1, -(-len(x_rv) // _BLOCKS))


def _in_blocks(f: Callable[..., Tensor], *tiles: Tensor) -> Tensor:
    """Concatenate f of blocks of rows, [s, rows]."""
    return torch.cat([f(*parts) for parts in zip(*(x.split(_step(x)) for x in tiles), strict=True)], 1)
