"""Collectives of pieces of unequal size for gloo, which lacks them; tensor-parallel experts need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_gather(pieces: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Like dist.all_gather, but `pieces` may differ in size."""
    if len({piece.shape for piece in pieces}) == 1:
        return dist.all_gather(pieces, tensor, group, async_op)
    ranks = dist.get_process_group_ranks(group)
    pieces[dist.get_rank(group)].copy_(tensor)
    for source, piece in zip(ranks, pieces, strict=True):
        dist.broadcast(piece, source, group)


def reduce_scatter(
    output: Tensor,
    pieces: list[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Like dist.reduce_scatter, but `pieces` may differ in size."""
    if len({piece.shape for piece in pieces}) == 1:
        return dist.reduce_scatter(output, pieces, op, group, async_op)
    for number, piece in enumerate(pieces):
        total = piece.contiguous().clone()
        dist.all_reduce(total, op, group)
        if number == dist.get_rank(group):
            output.copy_(total)


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    dist.all_gather: all_gather,
    dist.reduce_scatter: reduce_scatter,
}
